/* Schedules: the work of a rank's proxy for one call that a stream starts by ringing a bell. See
 * channels/schedules/DESIGN.md.
 *
 * A schedule posts to the peers that write here, sends to the peers that posted, and receives. All of it begins when a
 * stream has written the schedule's number to the bell. When all of it is complete, the word `done` is set to 1. In
 * between a stream may wait for a stage of the receives, process their data, and open the gate for sends. The steps
 * name channels and memories by id, which may be set before or after the schedule.
 */
#ifndef PROXYCCL_SCHEDULE_H
#define PROXYCCL_SCHEDULE_H

#include <stdint.h>

/* An id that a step does not have. */
#define PROXYCCL_NO_ID 0xffffffffu

enum {
  PROXYCCL_MAX_SCHEDULES = 65536, /* numbers from 1 to one less than this */
  PROXYCCL_SCHEDULE_STAGES = 16,
  PROXYCCL_MAX_WORKERS = 64 /* of a service that has schedules */
};

/* The count of a worker that no longer takes turns. */
#define PROXYCCL_NO_MORE_TURNS UINT64_MAX

/* The turns that a worker has taken. A worker whose thread is stopped, or does not return from a call, takes none. */
typedef struct ProxycclTurns {
  _Alignas(128) uint64_t count;
} ProxycclTurns;

/* The words through which streams and workers meet, in pinned memory: each writer has its own cache lines. A stream
 * resets all of them when the schedule is complete. */
typedef struct ProxycclScheduleWords {
  _Alignas(128) uint64_t bell;    /* a stream writes the number of a schedule, worker 0 resets it */
  _Alignas(128) uint64_t running; /* the number of the running schedule; 0: none */
  _Alignas(128) uint64_t done;    /* 1: the schedule is complete */
  _Alignas(128) uint64_t gate;    /* a stream counts up how far gated sends may go */
  _Alignas(128) uint64_t stages[PROXYCCL_SCHEDULE_STAGES]; /* receives and sends, or posts, of each that are complete */
  ProxycclTurns turns[PROXYCCL_MAX_WORKERS];               /* by worker, for whoever waits for any of it */
} ProxycclScheduleWords;

/* Lets a peer write. The peer writes nothing before that, and only in schedules in which this rank posts to it. */
typedef struct ProxycclSchedulePost {
  uint32_t channel; /* used only for posts; its remote word holds them */
  uint32_t memory;  /* first id of the memory to write to, in the peer's service */
  uint64_t offset;  /* in that memory, in bytes */
} ProxycclSchedulePost;

/* Copies, and signals after that. */
typedef struct ProxycclScheduleSend {
  uint32_t channel;      /* used only for schedules; its remote word counts sends */
  uint32_t post_channel; /* the channel on which the receiver's posts come in; PROXYCCL_NO_ID: it needs none */
  uint32_t src_memory;
  uint32_t dst_memory; /* PROXYCCL_NO_ID: the place that the receiver posted */
  uint64_t src_offset;
  uint64_t dst_offset; /* from there, or in `dst_memory` */
  uint64_t bytes;      /* may be 0 */
  uint64_t gate;       /* it waits until its gate is at least this; 0: it need not */
  uint32_t
      gate_stage; /* which of the words `stages` is its gate: what was received is sent on; PROXYCCL_NO_ID: `gate` */
  uint32_t stage; /* which of the words `stages` counts it when it is complete; PROXYCCL_NO_ID: none */
} ProxycclScheduleSend;

/* Waits until a peer's sends have arrived. */
typedef struct ProxycclScheduleReceive {
  uint32_t channel; /* used only for schedules; its own word counts the sends that arrived */
  uint32_t sends;   /* after those of earlier receives on the channel */
  uint32_t stage;   /* which of the words `stages` counts it; PROXYCCL_NO_ID: none */
} ProxycclScheduleReceive;

typedef struct ProxycclScheduleSteps {
  const ProxycclSchedulePost *posts;
  const ProxycclScheduleSend *sends;
  const ProxycclScheduleReceive *receives;
  uint32_t post_count, send_count, receive_count;
  uint32_t joined; /* which of the words `stages` counts the peers that have posted; PROXYCCL_NO_ID: none */
} ProxycclScheduleSteps;

#endif
