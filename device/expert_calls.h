/* Fills the arguments of a dispatch or a combine that was prepared before: those that differ from call to call. */
#ifndef PROXYCCL_EXPERT_CALLS_H
#define PROXYCCL_EXPERT_CALLS_H

#include <stddef.h>
#include <stdint.h>

#include "experts/experts.h"

enum { PROXYCCL_LAYOUT_TABLES = sizeof(ProxycclExpertLayout) / sizeof(int32_t*) };
#define PROXYCCL_NO_TABLE (~(uint64_t)0)

/* The tables that lie in one array, by their offsets in the order of the struct's fields; PROXYCCL_NO_TABLE for those
 * that do not, which stay as they are. */
static inline void proxyccl_expert_place(ProxycclExpertLayout* layout, uintptr_t array, const uint64_t* offsets) {
  int32_t** tables = (int32_t**)layout;
  for (int i = 0; i < PROXYCCL_LAYOUT_TABLES; ++i)
    if (offsets[i] != PROXYCCL_NO_TABLE) tables[i] = (int32_t*)(array + offsets[i]);
}

static inline void proxyccl_expert_dispatch_fill(ProxycclDispatch* call, uint64_t ticket, uint32_t tokens,
                                                 uintptr_t input, uintptr_t expert_ids, uintptr_t weights,
                                                 uintptr_t output, uintptr_t output_scales, uintptr_t output_weights,
                                                 uintptr_t received, uint32_t output_buffer) {
  call->ticket = ticket;
  call->tokens = tokens;
  call->input = (const char*)input;
  call->expert_ids = (const char*)expert_ids;
  call->weights = (const char*)weights;
  call->output = (char*)output;
  call->output_scales = (char*)output_scales;
  call->output_weights = (char*)output_weights;
  call->received = (int32_t*)received;
  call->output_buffer = output_buffer;
}

static inline void proxyccl_expert_combine_fill(ProxycclCombine* call, uint32_t tokens, uintptr_t rows,
                                                uint32_t rows_buffer, uintptr_t weights, uintptr_t slot_weights,
                                                uintptr_t output) {
  call->tokens = tokens;
  call->rows = (const char*)rows;
  call->rows_buffer = rows_buffer;
  call->weights = (const float*)weights;
  call->slot_weights = (const float*)slot_weights;
  call->output = (char*)output;
}

#endif
