/* Definitions that the expert-parallel kernels share with the host: the layer's geometry and memory, and one call's
 * arguments.
 *
 * Plain C. A slot is one expert choice of one token. Each rank's tokens are cut into segments of consecutive tokens;
 * block b of every rank handles segment b of every source, so blocks wait for other blocks only for the counts and,
 * between nodes, for messages with several segments (batches). A large dispatch has fewer segments than blocks; the
 * other blocks only send. A small dispatch sends no counts: it announces its choices to all ranks
 * (experts/announcement.h), and every block counts for itself.
 *
 * Every rank has a workspace, which has the same layout on all ranks and is mapped by the ranks of its node. It holds
 * flags (8-byte words that peers store and this rank polls) and slabs. A slab holds the data of one source for one rank
 * or node: for each segment its routing, then for each segment its tokens' rows. Between nodes consecutive segments
 * form a batch: their rows lie one after the other from the first segment's place on, and travel as one message.
 *
 * If a token has a row for each rank, the kernels treat each rank as one expert, and experts_per_rank is 1. A dispatch
 * counts once each rank that a token goes to (experts/choices.h). The token's choice there, a ProxycclExpertChoice,
 * takes the place of a slot's weight, so every rank that gets the token's routing has all its choices.
 *
 * - announced [2][…]: packets: the choices and weights of every rank
 * - inbox [local_size], where choices are announced, or with kept_calls, [2][local_size]: data from the ranks of the
 *   node
 * - rail [2][nodes]: data for this node from this rank's counterparts on other nodes; all ranks of the node read it
 *   here
 * - outbox [2][nodes]: this rank's data for its counterparts; the proxy reads it
 * - returns [kept_calls]: experts' rows on their way back to the tokens' ranks; return_rails: the same to rails
 * - partial_in, partial_out [2][nodes]: sums of a node on their way back to the tokens' ranks
 * - outputs [output_buffers]: rows [output_rows], and their scales (experts/dispatch_store.h)
 *
 * channels/expert_parallel/DESIGN.md has the rules by which they are reused.
 */
#ifndef PROXYCCL_EXPERTS_H
#define PROXYCCL_EXPERTS_H

#include "proxyccl/handles.h"

enum {
  PROXYCCL_MAX_TOPK = 16,
  PROXYCCL_ADDED = 2,            /* greatest number of arrays that a combine adds to its sums */
  PROXYCCL_EXPERT_THREADS = 512, /* threads of a block on a GPU; on other targets, most threads of a block */
  PROXYCCL_MAX_EXPERT_RANKS = 256,
  PROXYCCL_SCALED_ELEMENTS = 128, /* elements that share a scale, if rows are sent in float8 */
  /* Limits of announcements, as a block keeps them: slots of all ranks, slots of the block's segments, slots of one
   * segment, experts. */
  PROXYCCL_ANNOUNCED_SLOTS = 8192,
  PROXYCCL_ANNOUNCED_OWN_SLOTS = 2048,
  PROXYCCL_ANNOUNCED_SEGMENT_SLOTS = 256,
  PROXYCCL_ANNOUNCED_EXPERTS = 1024,
  PROXYCCL_IDS_PER_PACKET = 4,
  PROXYCCL_MASKED_RANKS = 64,         /* with a row for each rank: a token's ranks are bits of a word */
  PROXYCCL_ANNOUNCED_PAYLOADS = 2304, /* most payloads of 8 bytes, heads and choices of all ranks, that a block keeps */
  PROXYCCL_SUMMED_WORDS = 16,         /* words of a token mask whose bits are counted together */
  PROXYCCL_KEPT_TARGETS = 4096,       /* most slots of a segment that a block keeps while it counts them */
  PROXYCCL_CACHED_ROWS = 2048,        /* most slots of a block whose rows a combine looks up before it waits */
  PROXYCCL_EXPERT_COUNTERS =
      2048, /* most counters that a block keeps in shared memory; with more, bases lie in device memory */
  /* Phases of a dispatch, in any split over kernels that keeps their order. */
  PROXYCCL_EXPERT_ROUTE = 1,   /* count this rank's slots by expert, and send the counts to all ranks */
  PROXYCCL_EXPERT_GATHER = 2,  /* gather everyone's counts, and tell the CPU how many rows come */
  PROXYCCL_EXPERT_SEND = 4,    /* phase of a dispatch or a combine: send rows */
  PROXYCCL_EXPERT_RECEIVE = 8, /* phase of a dispatch or a combine: receive rows */
  PROXYCCL_EXPERT_LAYOUT = 16, /* instead of SEND and RECEIVE: only compute where the rows of a dispatch would go */
  PROXYCCL_EXPERT_TELL = 32,   /* with GATHER and a row for each rank: tell the CPU how many rows chose each expert */
  PROXYCCL_FIRST_CHOICE = 1
      << 30, /* in an announced ProxycclExpertChoice.expert: set for a token's first slot for that rank */
  /* Flags in ProxycclExperts that tell which ids drop a slot: */
  PROXYCCL_NUMBER_DROPS = 1,    /* the id that equals the number of experts */
  PROXYCCL_MINUS_ONE_DROPS = 2, /* the id -1 */
  /* Values in place of a row: */
  PROXYCCL_NO_ROW = -1,   /* the slot is dropped, or its expert is elsewhere */
  PROXYCCL_PAST_END = -2, /* the row belongs on this rank, but does not fit in the output */
};
#define PROXYCCL_NO_EXPERT 0xffffffffu

/* The head of a segment's routing. The following arrays come after it, at the offsets in ProxycclExperts:
 *   uint32 counts[experts]            slots of the segment for each expert
 *   uint32 chosen[ranks * chosen_per_rank]  with a row for each rank: choices of the segment, for each expert
 *   ProxycclExpertSlot slots[segment_tokens * topk]
 *   int32 places[segment_tokens]      across nodes: where in its batch's rows each token lies, or PROXYCCL_NO_ROW
 *   weights[segment_tokens * topk] */
typedef struct ProxycclExpertSegment {
  uint32_t tokens;        /* tokens of the whole source */
  uint32_t bad_slot;      /* the first slot with a bad expert id, or 0xffffffff */
  uint32_t wanted_tokens; /* see ProxycclDispatch.wanted_tokens */
  uint32_t output_buffer; /* the number of the source's output buffer, as in ProxycclDispatch.output_buffer */
} ProxycclExpertSegment;

typedef struct ProxycclExpertSlot {
  uint32_t expert;   /* the slot's expert, or PROXYCCL_NO_EXPERT */
  uint32_t position; /* the slot's position among the segment's slots for this expert */
} ProxycclExpertSlot;

typedef struct ProxycclExpertChoice {
  int32_t expert; /* number among all ranks' experts; -1 if the slot is dropped */
  float weight;
} ProxycclExpertChoice;

/* In pinned memory: the number of rows that a dispatch receives, which the CPU reads without waiting for the stream. */
typedef struct ProxycclReceivedRows {
  uint64_t ticket;    /* number of the dispatch that rows and wanted_tokens belong to; stored after the other fields */
  uint32_t rows;      /* rows that this rank receives */
  uint32_t bad_rank;  /* the first rank with a bad expert id in the latest dispatch with one, or PROXYCCL_NO_PEER if
                         there was none since the CPU last set it to that */
  uint32_t bad_slot;  /* that rank's first slot with a bad expert id */
  uint32_t bad_index; /* 1 if full_scatter_indices were not a permutation of this rank's rows, or too few */
  uint32_t most_rows; /* most rows of a rank or, with padded rows, of an expert, since the CPU last set this to 0 */
  uint32_t wanted_tokens; /* the greatest ProxycclDispatch.wanted_tokens of all ranks */
} ProxycclReceivedRows;

/* In device memory. Only the last block of a kernel advances these counters, so a captured graph can be replayed. */
typedef struct ProxycclExpertCounters {
  uint64_t dispatches, combines; /* calls whose last kernel every block has begun */
  uint64_t routings;             /* number of dispatches, without repeated ones */
  uint32_t
      next_item[2][2]; /* by the parity of the dispatch: next item of the rows for peers, and of this rank's own rows */
  uint32_t blocks_done;
  uint32_t has_failed; /* a dispatch gave up before it wrote its layout, and calls that read layouts must do nothing */
} ProxycclExpertCounters;

/* The parameter that every kernel of a layer takes, by value. */
typedef struct ProxycclExperts {
  uint32_t rank, world_size;
  uint32_t local_rank, local_size, node, nodes;
  const uint32_t* places;  /* [world_size]: node << 16 | number within the node */
  const uint32_t* members; /* [nodes][local_size]: ranks */
  uint32_t experts_per_rank, topk, max_tokens;
  uint32_t blocks;                   /* blocks of a kernel, and segments of a combine */
  uint32_t segments, segment_tokens; /* segments of a dispatch, most tokens of one; blocks without any only send */
  uint32_t local_combine, weight_bytes;
  uint32_t chosen_per_rank;                /* with a row for each rank: experts of each rank; else 0 */
  uint32_t padded_rows;                    /* with padded rows: most rows of an expert; else 0 */
  uint32_t expert_alignment;               /* each expert's rows begin at a multiple of this, if it is not 0 */
  uint32_t choice_packets, weight_packets; /* packets of an announcement; 0: counts are sent instead */
  uint32_t output_buffers, output_rows; /* number of buffers, of which the last is for a combine's rows; rows of each */
  uint32_t senders;    /* with output buffers: blocks that store a large dispatch's rows at peers; 0: only one block */
  uint32_t kept_calls; /* 2: inbox and returns are double-buffered, so that a call sends before peers have read the
                          previous one; else 1 */
  uint32_t dropping_ids;         /* PROXYCCL_NUMBER_DROPS, PROXYCCL_MINUS_ONE_DROPS, or both */
  uint32_t batch_tokens;         /* across nodes: least tokens of a source that make a separate message */
  uint64_t segment_bytes;        /* most bytes of a segment's rows */
  uint64_t return_segment_bytes; /* most bytes of a segment's rows in a combine, with one row per token */
  uint64_t counts_offset, slots_offset, places_offset, weights_offset; /* offsets in a segment's routing */
  uint64_t routing_bytes, slab_bytes; /* bytes of a segment's routing, and bytes of a slab */
  uint64_t least_message;             /* across nodes: shorter messages are lengthened to this many bytes */
  /* Offsets in a workspace. */
  uint64_t announced, inbox, rail, outbox, returns, return_rails, partial_in, partial_out, partial_bytes;
  uint64_t outputs, output_bytes, output_scales; /* the last two: bytes of a buffer; offset of the scales in a buffer */
  uint64_t routed, sent, read, returned, summed, loadable, crossed; /* flags; see experts/expert_team.h */
  ProxycclControl* control;
  char* workspace;
  char* const* peers;                           /* [local_size]: the workspaces of the node */
  const ProxycclProxyChannel* routing_channels; /* [nodes] */
  const ProxycclProxyChannel* out_channels;     /* [nodes][blocks], for dispatch: across nodes segments == blocks */
  const ProxycclProxyChannel* back_channels;    /* [nodes][blocks], for combine */
  /* [nodes * blocks + 1] counters of the blocks that are done with their part of a message, indexed by node and by the
   * first segment of the message's batch. A dispatch uses this node's row, a combine the row of the target node. The
   * last counter is for the routing. */
  uint32_t* arrivals;
  uint32_t* bases; /* [segments][2][experts]; with output buffers at least [blocks][2][world_size][segments] */
  ProxycclReceivedRows* received_rows;
  /* In pinned memory: how many slots chose each of this rank's experts, stored before the ticket. With a row for each
   * rank [chosen_per_rank], with expert_alignment [experts_per_rank]. */
  uint32_t* chosen_rows;
  ProxycclExpertCounters* counters;
} ProxycclExperts;

/* The places of a dispatch's rows, in device memory. Combines, and dispatches by the same routing, read these places.
 */
typedef struct ProxycclExpertLayout {
  int32_t* tokens;      /* [world_size]: tokens of each rank */
  int32_t* counts;      /* [world_size][experts] */
  int32_t* rows;        /* [world_size][max_tokens][topk]: this rank's row of each slot */
  int32_t* places;      /* [world_size][max_tokens]: across nodes, where the token lies in its batch's rows */
  int32_t* sent_places; /* [nodes][max_tokens]: for each node, places of this rank's tokens in their batch's rows */
  int32_t* expert_ids; /* [nodes][max_tokens][topk]: expert ids of this rank's tokens and of its counterparts' tokens */
  int32_t* first_rows; /* [rows]: the first row of the same token on this rank */
  int32_t* token_rows; /* [rows][topk]: if this is its token's first row, the row of each slot of the token */
  int32_t* row_slots;  /* [rows]: each row's slot of its token */
  int32_t* row_tokens; /* [rows]: the number of the row's token on the token's rank; or null */
  int32_t* row_experts; /* with a row for each rank, [rows][topk] of id_bytes each: the token's experts on this rank, by
                           their number on the rank; -1 for others */
  int32_t* expert_rows; /* with padded rows, [experts_per_rank]: rows of each expert, at most its room */
  int32_t* sent_rows;   /* with output buffers, [max_tokens][topk]: the row of each slot of this rank's tokens, on the
                           slot's rank */
} ProxycclExpertLayout;

typedef struct ProxycclDispatch {
  uint32_t phases;
  uint32_t tokens;        /* tokens of this rank */
  uint32_t capacity;      /* rows of the output */
  uint32_t redispatch;    /* 1: the dispatch uses an existing layout and counts nothing */
  uint64_t ticket;        /* see ProxycclReceivedRows */
  uint32_t wanted_tokens; /* tokens, sent to all ranks, for which this rank would have needed a larger layer; or 0 */
  uint32_t scale_bytes;   /* bytes of scales at the end of each row, which go to output_scales */
  uint32_t scale_column;  /* with padded rows: words of a column of an expert's scales, one column for each scale of a
                             row; 0: each row's scales lie together */
  uint32_t id_bytes;      /* size of an expert id: 4 or 8; also in row_experts, unless the dispatch is repeated */
  uint32_t output_buffer; /* if senders store rows in output buffers: 1 + the number of this rank's buffer; else 0 */
  uint32_t padded_rows;   /* with padded rows: most rows of an expert in this call */
  uint64_t row_bytes;
  const char* input;       /* [tokens][row_bytes] */
  const char* expert_ids;  /* [tokens][topk] of id_bytes each; for a repeated dispatch the layout's ids */
  const char* weights;     /* [tokens][topk], or null; float32 with a row for each rank */
  const int32_t* scatter;  /* [scatter_tokens][topk], or null */
  uint64_t scatter_tokens; /* tokens of all ranks, as the caller passed them; a stopped rank's data may claim more */
  char* output;            /* [capacity][row_bytes - scale_bytes] */
  char* output_scales;     /* [capacity][scale_bytes] */
  char* output_weights;    /* [capacity], or null; with a row for each rank [capacity][topk] */
  int32_t* received;       /* output: the number of received rows; or null */
  ProxycclExpertLayout layout;
} ProxycclDispatch;

typedef struct ProxycclCombine {
  uint32_t phases;
  uint32_t tokens;
  uint64_t hidden;
  uint32_t rows_buffer; /* 1 + the number of the output buffer in which `rows` lies; 0 if peers can't load them */
  const char* rows;     /* [R][hidden] */
  const float* weights; /* [R], or null */
  /* [tokens][topk], or null: factors of the slots' rows, beside `weights`. Used only on one node and without
     local_combine. */
  const float* slot_weights;
  /* [tokens][hidden] each, or null: sums begin with these arrays. If there is a second array, there is a first one. */
  const char* added[PROXYCCL_ADDED];
  /* [tokens][topk] of id_bytes each, or null: the ids that the caller dispatched by. A token's rows, one from each
   * rank, are then summed in the order of the token's last slots for these ranks. Used only on one node, where each
   * rank sends one row or one sum per token. */
  const char* order_ids;
  uint64_t id_bytes;
  char* output; /* [tokens][hidden] */
  ProxycclExpertLayout layout;
} ProxycclCombine;

/* The arguments of expert_weigh, which changes rows in place. Rows that no dispatch has filled become zero. */
typedef struct ProxycclWeighing {
  uint64_t rows, hidden;
  char* values;         /* [rows][hidden] */
  const float* weights; /* [rows]: the factor of each row; or null for 1 */
  const char* others;   /* [rows][hidden], or null */
  float* products; /* [rows]: scalar product of each row, before it is weighed, with the same row of `others`; zero for
                      unfilled rows; or null */
  const int32_t* received;  /* number of filled rows; null if all rows are filled */
  const int32_t* row_slots; /* [rows]: negative for unfilled rows; or null */
} ProxycclWeighing;

#endif
