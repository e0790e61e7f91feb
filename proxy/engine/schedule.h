/* A schedule is the list of a rank's transfers for one call of a collective. The rank's proxy makes these transfers
 * once a stream writes the schedule's number to the word `bell`. See channels/schedules/DESIGN.md.
 *
 * A schedule has three kinds of steps. A post allows a peer to write to this rank's memory; a send writes to a peer
 * that has posted; a receive waits for data from a peer. When all steps are complete, the proxy sets the word `done` to
 * 1. While the schedule runs, a stream may wait until a stage (a counter of steps) shows that receives are complete,
 * process the received data, and increase the word `gate` to allow further sends. The steps name channels and memories
 * by id; table entries for the ids may be set before or after the schedule is added. */
#pragma once

#include <stdint.h>

/* The value of an id field that a step does not use. */
#define PROXYCCL_NO_ID 0xffffffffu

enum {
  PROXYCCL_MAX_SCHEDULES = 65536, /* schedules are numbered from 1; this is one more than the largest number */
  PROXYCCL_SCHEDULE_STAGES = 16,
  PROXYCCL_MAX_WORKERS = 64 /* maximum number of workers of a service that has schedules */
};

/* The turn count of a worker that has ended. */
#define PROXYCCL_NO_MORE_TURNS UINT64_MAX

/* Counts how often a thread has run a worker (the worker's turns). The count does not change while the thread is
 * stopped or stuck in a call. */
typedef struct ProxycclTurns {
  _Alignas(128) uint64_t count;
} ProxycclTurns;

/* The words with which streams and workers synchronize, in pinned memory; words of different writers are in different
 * cache lines. A stream resets the words when the schedule is complete. */
typedef struct ProxycclScheduleWords {
  _Alignas(128) uint64_t bell;    /* a stream stores the number of a schedule; worker 0 resets the word to 0 */
  _Alignas(128) uint64_t running; /* the number of the running schedule; 0 if no schedule runs */
  _Alignas(128) uint64_t done;    /* 1 if the schedule is complete */
  _Alignas(128) uint64_t gate;    /* streams increase this count; a gated send may start once the count has reached the
                                     send's `gate` */
  _Alignas(128) uint64_t stages[PROXYCCL_SCHEDULE_STAGES]; /* for each stage: number of completed receives and sends, or
                                                              of peers that have posted */
  ProxycclTurns turns[PROXYCCL_MAX_WORKERS];               /* indexed by worker number; read by threads that wait for a
                                                              schedule */
} ProxycclScheduleWords;

/* Allows a peer to write to this rank's memory. If a schedule has a post to a peer, the peer writes only after the
 * post. */
typedef struct ProxycclSchedulePost {
  uint32_t channel; /* a channel that is used only for posts; its remote word holds the post */
  uint32_t memory;  /* the memory to write to, as the id of the memory's first window in the peer's service */
  uint64_t offset;  /* offset in that memory, in bytes */
} ProxycclSchedulePost;

/* Copies data to a peer, then signals. */
typedef struct ProxycclScheduleSend {
  uint32_t channel;      /* a channel that is used only for schedules; its remote word counts sends */
  uint32_t post_channel; /* the channel of the receiver's posts; PROXYCCL_NO_ID if the send waits for no post */
  uint32_t src_memory;
  uint32_t dst_memory; /* the memory to write to; PROXYCCL_NO_ID for the address that the receiver posted */
  uint64_t src_offset;
  uint64_t dst_offset; /* offset from the posted address, or from the start of `dst_memory` */
  uint64_t bytes;      /* may be 0 */
  uint64_t gate;       /* the count that the send's gate must reach; 0 without a gate */
  uint32_t gate_stage; /* index of the word in `stages` that is the send's gate; PROXYCCL_NO_ID for the word `gate` */
  uint32_t stage;      /* index of the word in `stages` that counts the complete send, or PROXYCCL_NO_ID */
} ProxycclScheduleSend;

/* Waits until a peer's sends have arrived. */
typedef struct ProxycclScheduleReceive {
  uint32_t channel; /* a channel that is used only for schedules; its word in this rank counts arrived sends */
  uint32_t sends;   /* number of sends to wait for, beyond the sends that earlier receives on the channel await */
  uint32_t stage;   /* index of the word in `stages` that counts the complete receive, or PROXYCCL_NO_ID */
} ProxycclScheduleReceive;

typedef struct ProxycclScheduleSteps {
  const ProxycclSchedulePost *posts;
  const ProxycclScheduleSend *sends;
  const ProxycclScheduleReceive *receives;
  uint32_t post_count, send_count, receive_count;
  uint32_t joined; /* index of the word in `stages` that counts the peers that have posted, or PROXYCCL_NO_ID */
} ProxycclScheduleSteps;
