/* Fills the arguments of a dispatch or a combine that was prepared before: those that differ from call to call. */
#ifndef PROXYCCL_EXPERT_CALLS_H
#define PROXYCCL_EXPERT_CALLS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "experts/experts.h"

#define PROXYCCL_LAYOUT_TABLES ((int)(sizeof(ProxycclExpertLayout) / sizeof(int32_t*)))
#define PROXYCCL_NO_TABLE (~(uint64_t)0)

/* The tables that lie in one array, by their offsets in the order of the struct's fields; PROXYCCL_NO_TABLE for those
 * that do not, which stay as they are. */
static inline void proxyccl_expert_place(ProxycclExpertLayout* layout, uintptr_t array, const uint64_t* offsets) {
  int32_t** tables = (int32_t**)layout;
  for (int i = 0; i < PROXYCCL_LAYOUT_TABLES; ++i)
    if (offsets[i] != PROXYCCL_NO_TABLE) tables[i] = (int32_t*)(array + offsets[i]);
}

/* A dispatch's inputs, for phases that receive nothing. The layout has no tables then; `place` follows. */
static inline void proxyccl_expert_dispatch_send(ProxycclDispatch* call, uint32_t phases, uint64_t ticket,
                                                 uint32_t tokens, uintptr_t input, uintptr_t expert_ids,
                                                 uintptr_t weights, uint32_t output_buffer) {
  call->phases = phases;
  call->ticket = ticket;
  call->tokens = tokens;
  call->input = (const char*)input;
  call->expert_ids = (const char*)expert_ids;
  call->weights = (const char*)weights;
  call->output_buffer = output_buffer;
  call->capacity = call->scale_bytes = 0;
  call->output = call->output_scales = call->output_weights = NULL;
  call->received = NULL;
  memset(&call->layout, 0, sizeof call->layout);
}

/* Its outputs, for phases that receive. */
static inline void proxyccl_expert_dispatch_receive(ProxycclDispatch* call, uint32_t phases, uint32_t capacity,
                                                    uint32_t scale_bytes, uintptr_t output, uintptr_t output_scales,
                                                    uintptr_t output_weights, uintptr_t received) {
  call->phases = phases;
  call->capacity = capacity;
  call->scale_bytes = scale_bytes;
  call->output = (char*)output;
  call->output_scales = (char*)output_scales;
  call->output_weights = (char*)output_weights;
  call->received = (int32_t*)received;
}

/* The layout has no tables then; `place` follows. */
static inline void proxyccl_expert_combine_fill(ProxycclCombine* call, uint32_t phases, uint32_t tokens, uintptr_t rows,
                                                uint32_t rows_buffer, uintptr_t weights, uintptr_t slot_weights,
                                                uintptr_t output) {
  call->phases = phases;
  call->tokens = tokens;
  call->rows = (const char*)rows;
  call->rows_buffer = rows_buffer;
  call->weights = (const float*)weights;
  call->slot_weights = (const float*)slot_weights;
  call->output = (char*)output;
  memset(&call->layout, 0, sizeof call->layout);
}

/* The first summands, and the ids that order the sums; 0 for none. */
static inline void proxyccl_expert_combine_order(ProxycclCombine* call, uintptr_t added, uintptr_t also_added,
                                                 uintptr_t ids, uint32_t id_bytes) {
  call->added[0] = (const char*)added;
  call->added[1] = (const char*)also_added;
  call->order_ids = (const char*)ids;
  call->id_bytes = id_bytes;
}

#endif
