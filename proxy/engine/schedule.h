/* Schedules: the work of a rank's proxy for one call that a stream starts by ringing a bell. See
 * channels/schedules/DESIGN.md.
 *
 * A schedule posts to the peers that write here, sends to the peers that posted, and receives. All of it begins when a
 * stream has written the schedule's number to the bell. When all of it is complete, the word `done` is set to 1. In
 * between, a stream may wait for a stage of receives, process the received data, and open the gate for sends. The steps
 * name channels and memories by id, which may be set before or after the schedule.
 */
#ifndef PROXYCCL_SCHEDULE_H
#define PROXYCCL_SCHEDULE_H

#include <stdint.h>

/* Stands for an id that a step lacks. */
#define PROXYCCL_NO_ID 0xffffffffu

enum {
  PROXYCCL_MAX_SCHEDULES = 65536, /* numbers from 1 to one less than this */
  PROXYCCL_SCHEDULE_STAGES = 16,
  PROXYCCL_MAX_WORKERS = 64 /* most workers of a service that has schedules */
};

/* The count of a worker that no longer takes turns. */
#define PROXYCCL_NO_MORE_TURNS UINT64_MAX

/* The turns that a worker has taken. A worker whose thread is stopped, or does not return from a call, takes none. */
typedef struct ProxycclTurns {
  _Alignas(128) uint64_t count;
} ProxycclTurns;

/* The words by which streams and workers synchronize, in pinned memory, with separate cache lines for each writer. A
 * stream resets the words when the schedule is complete. */
typedef struct ProxycclScheduleWords {
  _Alignas(128) uint64_t bell;    /* a stream writes the number of a schedule, worker 0 resets it */
  _Alignas(128) uint64_t running; /* the number of the running schedule, or 0 */
  _Alignas(128) uint64_t done;    /* 1: the schedule is complete */
  _Alignas(128) uint64_t gate;    /* the count, raised by streams, up to which gated sends may go */
  _Alignas(128) uint64_t stages[PROXYCCL_SCHEDULE_STAGES]; /* completed receives and sends, or posts, by stage */
  ProxycclTurns turns[PROXYCCL_MAX_WORKERS];               /* by worker, for threads that wait for a schedule */
} ProxycclScheduleWords;

/* Lets a peer write. The peer writes only after the post, in schedules in which this rank posts to the peer. */
typedef struct ProxycclSchedulePost {
  uint32_t channel; /* used only for posts, which the channel's remote word holds */
  uint32_t memory;  /* first id of the memory to write to, in the peer's service */
  uint64_t offset;  /* in that memory, in bytes */
} ProxycclSchedulePost;

/* Copies to a peer, then signals. */
typedef struct ProxycclScheduleSend {
  uint32_t channel;      /* used only for schedules; the channel's remote word counts sends */
  uint32_t post_channel; /* the channel of the receiver's posts; PROXYCCL_NO_ID if the send waits for no post */
  uint32_t src_memory;
  uint32_t dst_memory; /* the memory to write to; PROXYCCL_NO_ID: the place that the receiver posted */
  uint64_t src_offset;
  uint64_t dst_offset; /* offset from the posted place, or in `dst_memory` */
  uint64_t bytes;      /* may be 0 */
  uint64_t gate;       /* the count that the send's gate must reach; 0 without a gate */
  uint32_t gate_stage; /* index of the word in `stages` that is the gate; PROXYCCL_NO_ID: the gate is the word `gate` */
  uint32_t stage;      /* index of the word in `stages` that counts the complete send, or PROXYCCL_NO_ID */
} ProxycclScheduleSend;

/* Waits until a peer's sends have arrived. */
typedef struct ProxycclScheduleReceive {
  uint32_t channel; /* used only for schedules; this rank's word of the channel counts arrived sends */
  uint32_t sends;   /* sends to wait for, beyond the sends of earlier receives on the channel */
  uint32_t stage;   /* index of the word in `stages` that counts the complete receive, or PROXYCCL_NO_ID */
} ProxycclScheduleReceive;

typedef struct ProxycclScheduleSteps {
  const ProxycclSchedulePost *posts;
  const ProxycclScheduleSend *sends;
  const ProxycclScheduleReceive *receives;
  uint32_t post_count, send_count, receive_count;
  uint32_t joined; /* index of the word in `stages` that counts the peers that have posted, or PROXYCCL_NO_ID */
} ProxycclScheduleSteps;

#endif
