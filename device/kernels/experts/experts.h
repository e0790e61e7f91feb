/* Structs that the host fills in for the expert-parallel kernels: a layer's sizes and memory, and one call's arguments.
 *
 * A slot is one expert choice of one token; a source is a rank whose tokens are sent. Each source's tokens are cut into
 * segments of consecutive tokens. Block b of every rank handles segment b of every source, so a block waits for blocks
 * with other numbers only for the counts and, between nodes, for messages that hold several segments (batches). In a
 * large dispatch there are fewer segments than blocks, and the blocks without a segment only send. In a small dispatch,
 * ranks announce their choices to all ranks (experts/announcement.h) instead of counts, and every block counts the
 * choices itself.
 *
 * Every rank has a workspace, which has the same layout on all ranks and which all ranks of the node map. A workspace
 * holds flags (8-byte words that peers store and the owner polls) and slabs. A slab holds the data of one source for
 * one rank or node: first the routing (counts, slots, weights) of each segment, then the rows of each segment. Between
 * nodes, consecutive segments form a batch: their rows are contiguous from the first segment's address on, and are sent
 * as one message.
 *
 * If a token has one row per rank (chosen_per_rank is not 0), the kernels treat each rank as one expert, and
 * experts_per_rank is 1. A dispatch counts each of a token's ranks once (experts/choices.h). A slot's expert and weight
 * (ProxycclExpertChoice) are sent in place of the slot's weight, so every rank that gets a token's routing has all
 * choices of the token.
 *
 * - announced [2][…]: packets with the choices and weights of every rank
 * - inbox [local_size] or, if choices are announced or kept_calls is 2, [2][local_size]: data from the ranks of the
 *   node
 * - rail [2][nodes]: data from this rank's counterparts on other nodes, for all ranks of this node
 * - outbox [2][nodes]: this rank's data for its counterparts; the proxy reads the data
 * - returns [kept_calls]: experts' rows for the tokens' ranks in a combine; return_rails: the rows for counterparts of
 *   the tokens' ranks
 * - partial_in, partial_out [2][nodes]: nodes' sums for the tokens' ranks in a combine
 * - outputs [output_buffers]: rows [output_rows], and their scales (experts/dispatch_store.h)
 *
 * channels/expert_parallel/DESIGN.md explains when this memory may be reused.
 */
#pragma once

#include "proxyccl/handles.h"

enum {
  PROXYCCL_MAX_TOPK = 16,
  PROXYCCL_ADDED = 2,            /* greatest number of arrays that a combine adds to its sums */
  PROXYCCL_EXPERT_THREADS = 512, /* threads of a block on a GPU; maximum number of threads of a block on the host */
  PROXYCCL_MAX_EXPERT_RANKS = 256,
  PROXYCCL_SCALED_ELEMENTS = 128, /* elements that share a scale, if rows are sent in float8 */
  /* Limits of announced ids, which a block keeps in shared memory: slots of all ranks, slots of the block's segments,
   * slots of one segment, experts. */
  PROXYCCL_ANNOUNCED_SLOTS = 8192,
  PROXYCCL_ANNOUNCED_OWN_SLOTS = 2048,
  PROXYCCL_ANNOUNCED_SEGMENT_SLOTS = 256,
  PROXYCCL_ANNOUNCED_EXPERTS = 1024,
  PROXYCCL_IDS_PER_PACKET = 4,
  PROXYCCL_MASKED_RANKS = 64,         /* maximum number of ranks whose choices are announced as masks */
  PROXYCCL_ANNOUNCED_PAYLOADS = 2304, /* 8-byte payloads (heads and choices of all ranks) that a block can keep */
  PROXYCCL_SUMMED_WORDS = 16,         /* a mask has one partial count of bits for this many words */
  PROXYCCL_KEPT_TARGETS = 4096,       /* while a block counts slots, it keeps the targets of up to this many slots */
  PROXYCCL_CACHED_ROWS = 2048,        /* maximum number of slots of a block whose rows a combine looks up in advance */
  PROXYCCL_EXPERT_COUNTERS =
      2048, /* maximum number of counters that a block keeps in shared memory; more are in device memory (`bases`) */
  /* Phases of a dispatch. A call may divide the phases over several kernels, in this order. */
  PROXYCCL_EXPERT_ROUTE = 1,   /* count this rank's slots by expert, and send the counts to all ranks */
  PROXYCCL_EXPERT_GATHER = 2,  /* gather the counts of all ranks, and report the number of received rows to the CPU */
  PROXYCCL_EXPERT_SEND = 4,    /* phase of a dispatch or a combine: send rows */
  PROXYCCL_EXPERT_RECEIVE = 8, /* phase of a dispatch or a combine: receive rows */
  PROXYCCL_EXPERT_LAYOUT = 16, /* instead of SEND and RECEIVE: only compute where the rows of a dispatch would go */
  PROXYCCL_EXPERT_TELL = 32,   /* with GATHER, if tokens have one row per rank: count each expert's slots for the CPU */
  PROXYCCL_FIRST_CHOICE = 1
      << 30, /* bit of an announced ProxycclExpertChoice.expert: set in a token's first slot for each rank */
  /* Bits of ProxycclExperts.dropping_ids, which says for which expert ids a slot is dropped: */
  PROXYCCL_NUMBER_DROPS = 1,    /* drop slots whose expert id is the number of experts, one more than the last id */
  PROXYCCL_MINUS_ONE_DROPS = 2, /* drop slots whose expert id is -1 */
  /* Values in place of a row: */
  PROXYCCL_NO_ROW = -1,   /* the slot is dropped, or its expert is on another rank */
  PROXYCCL_PAST_END = -2, /* the row is for this rank, but does not fit in the output */
};
#define PROXYCCL_NO_EXPERT 0xffffffffu

/* The head of a segment's routing. The following arrays come after the head, at the offsets in ProxycclExperts:
 *   uint32 counts[experts]            number of the segment's slots for each expert
 *   uint32 chosen[ranks * chosen_per_rank]  if tokens have one row per rank: the segment's slots for each expert
 *   ProxycclExpertSlot slots[segment_tokens * topk]
 *   int32 places[segment_tokens]      between nodes: the position of each token's row in its batch, or PROXYCCL_NO_ROW
 *   weights[segment_tokens * topk] */
typedef struct ProxycclExpertSegment {
  uint32_t tokens;        /* number of the source's tokens in all segments */
  uint32_t bad_slot;      /* the first slot whose expert id is out of range, or 0xffffffff */
  uint32_t wanted_tokens; /* see ProxycclDispatch.wanted_tokens */
  uint32_t output_buffer; /* the number of the source's output buffer, as in ProxycclDispatch.output_buffer */
} ProxycclExpertSegment;

typedef struct ProxycclExpertSlot {
  uint32_t expert;   /* the slot's expert, or PROXYCCL_NO_EXPERT */
  uint32_t position; /* number of earlier slots of the segment with the same expert */
} ProxycclExpertSlot;

typedef struct ProxycclExpertChoice {
  int32_t expert; /* the expert's number among all ranks' experts; -1 if the slot is dropped */
  float weight;
} ProxycclExpertChoice;

/* The results that a dispatch reports, in pinned memory, which the CPU reads without waiting for the stream. */
typedef struct ProxycclReceivedRows {
  uint64_t ticket;    /* number of the dispatch that stored `rows` and `wanted_tokens`; stored after the other fields */
  uint32_t rows;      /* rows that this rank receives */
  uint32_t bad_rank;  /* the first rank with an expert id out of range, in the latest dispatch that had one;
                         PROXYCCL_NO_PEER, which the CPU stores, if there was none */
  uint32_t bad_slot;  /* the first slot of bad_rank whose expert id is out of range */
  uint32_t bad_index; /* 1 if full_scatter_indices were too few, or not a permutation of this rank's rows */
  uint32_t most_rows; /* largest number of rows of a rank or, with padded rows, of an expert; the CPU resets it to 0 */
  uint32_t wanted_tokens; /* the greatest ProxycclDispatch.wanted_tokens of all ranks */
} ProxycclReceivedRows;

/* Counters in device memory, which only the last block of a kernel advances, so a captured graph can be replayed. */
typedef struct ProxycclExpertCounters {
  uint64_t dispatches, combines; /* number of calls; counted when all blocks of a call's last kernel have begun */
  uint64_t routings;             /* number of dispatches, without redispatches */
  uint32_t
      next_item[2][2]; /* indexed by the dispatch's parity: next item of rows for peers, and of this rank's own rows */
  uint32_t blocks_done;
  uint32_t has_failed; /* not 0 if a dispatch failed and wrote no layout; calls that read the layout do nothing */
} ProxycclExpertCounters;

/* A parameter of every kernel of a layer, passed by value. */
typedef struct ProxycclExperts {
  uint32_t rank, world_size;
  uint32_t local_rank, local_size, node, nodes;
  const uint32_t* places;  /* [world_size]: node << 16 | number within the node */
  const uint32_t* members; /* [nodes][local_size]: ranks */
  uint32_t experts_per_rank, topk, max_tokens;
  uint32_t blocks;                   /* number of blocks of a kernel, and of segments of a combine */
  uint32_t segments, segment_tokens; /* number of segments of a dispatch, and maximum number of tokens of one */
  uint32_t local_combine, weight_bytes;
  uint32_t chosen_per_rank;                /* number of experts per rank, if tokens have one row per rank; else 0 */
  uint32_t padded_rows;                    /* maximum number of rows of an expert, if rows are padded; else 0 */
  uint32_t expert_alignment;               /* each expert's rows begin at a multiple of this number; 0: no alignment */
  uint32_t choice_packets, weight_packets; /* packets of a rank's announcement; 0 if counts are sent instead */
  uint32_t output_buffers, output_rows;    /* number of buffers (the last for a combine's rows), and rows per buffer */
  uint32_t senders;    /* number of blocks that store rows of a large dispatch to peers; 0 if a kernel has one block */
  uint32_t kept_calls; /* 2 if inbox and returns are double-buffered, so that successive calls overlap; else 1 */
  uint32_t dropping_ids;         /* PROXYCCL_NUMBER_DROPS, PROXYCCL_MINUS_ONE_DROPS, or both */
  uint32_t batch_tokens;         /* between nodes: least number of tokens of a separate message */
  uint64_t segment_bytes;        /* maximum number of bytes of a segment's rows */
  uint64_t return_segment_bytes; /* maximum number of bytes of a segment's rows in a combine, for one row per token */
  uint64_t counts_offset, slots_offset, places_offset, weights_offset; /* offsets in a segment's routing */
  uint64_t routing_bytes, slab_bytes; /* bytes of a segment's routing, and bytes of a slab */
  uint64_t least_message;             /* between nodes: shorter messages are padded to this number of bytes */
  /* Offsets in a workspace. */
  uint64_t announced, inbox, rail, outbox, returns, return_rails, partial_in, partial_out, partial_bytes;
  uint64_t outputs, output_bytes, output_scales; /* output_bytes: size of a buffer; output_scales: its scales' offset */
  uint64_t routed, sent, read, returned, summed, loadable, crossed; /* flags; see experts/expert_team.h */
  ProxycclControl* control;
  char* workspace;
  char* const* peers;                           /* [local_size]: the workspaces of the node's ranks */
  const ProxycclProxyChannel* routing_channels; /* [nodes] */
  const ProxycclProxyChannel* out_channels;     /* [nodes][blocks], for dispatch; between nodes, segments == blocks */
  const ProxycclProxyChannel* back_channels;    /* [nodes][blocks], for combine */
  /* [nodes * blocks + 1]: counters of the blocks that have stored their part of a message. The index is [node][first
   * segment of the message's batch]; the node is this rank's in a dispatch, the target's in a combine. The last counter
   * is for the routing. */
  uint32_t* arrivals;
  uint32_t* bases; /* [segments][2][experts]; with output buffers at least [blocks][2][world_size][segments] */
  ProxycclReceivedRows* received_rows;
  /* In pinned memory: the number of slots that chose each of this rank's experts, stored before the ticket:
   * [chosen_per_rank] if tokens have one row per rank, [experts_per_rank] with expert_alignment. */
  uint32_t* chosen_rows;
  ProxycclExpertCounters* counters;
} ProxycclExperts;

/* The positions of a dispatch's rows, in device memory, for combines and repeated dispatches. */
typedef struct ProxycclExpertLayout {
  int32_t* tokens;      /* [world_size]: number of tokens of each rank */
  int32_t* counts;      /* [world_size][experts] */
  int32_t* rows;        /* [world_size][max_tokens][topk]: this rank's row of each slot */
  int32_t* places;      /* [world_size][max_tokens]: between nodes, the position of the token's row in its batch */
  int32_t* sent_places; /* [nodes][max_tokens]: positions of this rank's tokens in their batches for each node */
  int32_t* expert_ids; /* [nodes][max_tokens][topk]: expert ids of this rank's tokens and of its counterparts' tokens */
  int32_t* first_rows; /* [rows]: the first row that the row's token has on this rank */
  int32_t* token_rows; /* [rows][topk]: for a token's first row, the row of each slot of the token */
  int32_t* row_slots;  /* [rows]: the number, from 0 to topk - 1, of the row's slot */
  int32_t* row_tokens; /* [rows]: the number of the row's token on the token's rank; or null */
  int32_t* row_experts; /* if tokens have one row per rank, [rows][topk] of id_bytes each: the token's experts on this
                           rank, by their number on the rank; -1 for experts of other ranks */
  int32_t* expert_rows; /* with padded rows, [experts_per_rank]: number of each expert's rows that fit */
  int32_t* sent_rows;   /* with output buffers, [max_tokens][topk]: the row that each slot of this rank's tokens has on
                           the slot's rank */
} ProxycclExpertLayout;

typedef struct ProxycclDispatch {
  uint32_t phases;
  uint32_t tokens;        /* number of tokens of this rank */
  uint32_t capacity;      /* number of rows of the output */
  uint32_t redispatch;    /* 1: the dispatch uses an existing layout and counts nothing */
  uint64_t ticket;        /* see ProxycclReceivedRows */
  uint32_t wanted_tokens; /* number of this rank's tokens if they need a larger layer, sent to all ranks; else 0 */
  uint32_t scale_bytes;   /* bytes of scales at the end of each row; the receiver stores them in output_scales */
  uint32_t scale_column;  /* with padded rows: words from one column of an expert's scales to the next, if these are
                             stored column by column; 0 if each row's scales are contiguous */
  uint32_t id_bytes;      /* size of an expert id, 4 or 8 bytes; also of row_experts, unless the dispatch is repeated */
  uint32_t output_buffer; /* 1 + the number of this rank's output buffer, if senders store rows in it; else 0 */
  uint32_t padded_rows;   /* maximum number of rows of an expert in this call, if rows are padded */
  uint64_t row_bytes;
  const char* input;       /* [tokens][row_bytes] */
  const char* expert_ids;  /* [tokens][topk] of id_bytes each; for a repeated dispatch the layout's ids */
  const char* weights;     /* [tokens][topk], or null; float32 if tokens have one row per rank */
  const int32_t* scatter;  /* [scatter_tokens][topk], or null */
  uint64_t scatter_tokens; /* the number of tokens of all ranks; a failed rank's data may claim more */
  char* output;            /* [capacity][row_bytes - scale_bytes] */
  char* output_scales;     /* [capacity][scale_bytes] */
  char* output_weights;    /* [capacity] or, if tokens have one row per rank, [capacity][topk]; or null */
  int32_t* received;       /* receives the number of received rows; or null */
  ProxycclExpertLayout layout;
} ProxycclDispatch;

typedef struct ProxycclCombine {
  uint32_t phases;
  uint32_t tokens;
  uint64_t hidden;
  uint32_t rows_buffer; /* 1 + the number of the output buffer that holds `rows`; 0 if peers can't load the rows */
  const char* rows;     /* [R][hidden] */
  const float* weights; /* [R], or null */
  /* [tokens][topk], or null: a further factor of each slot's row, only on one node and without local_combine. */
  const float* slot_weights;
  /* [tokens][hidden] each, or null: arrays that are added first in each sum. added[1] is null if added[0] is null. */
  const char* added[PROXYCCL_ADDED];
  /* [tokens][topk] of id_bytes each, or null: the expert ids of the caller's dispatch. With these ids, the rows that a
   * token has on several ranks are added in the order of the token's last slot for each rank. The ids are used only on
   * one node, if each rank sends one row or one sum per token. */
  const char* order_ids;
  uint64_t id_bytes;
  char* output; /* [tokens][hidden] */
  ProxycclExpertLayout layout;
  /* The remaining fields are only for combine_signalled. A row of an expert is complete when the counter of its block
   * of block_rows rows has reached `threshold`. */
  const uint32_t* signals; /* [experts][expert_blocks] */
  uint32_t expert_rows, expert_blocks, block_rows, threshold;
  uint32_t senders; /* number of thread blocks that send; each sends the rows of several segments */
} ProxycclCombine;

/* The arguments of expert_weigh, which multiplies rows by weights in place and clears unfilled rows. */
typedef struct ProxycclWeighing {
  uint64_t rows, hidden;
  char* values;         /* [rows][hidden] */
  const float* weights; /* [rows]: the factor of each row; null if all are 1 */
  const char* others;   /* [rows][hidden], or null */
  float* products; /* [rows]: scalar product of each row, before the multiplication, with its row of `others`; zero for
                      unfilled rows; or null */
  const int32_t* received;  /* number of filled rows; null if all rows are filled */
  const int32_t* row_slots; /* [rows]: negative for unfilled rows; or null */
} ProxycclWeighing;
