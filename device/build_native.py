"""Declares the extension `proxyccl.device._native`: the host runtime, and the structs that kernels and Python share.

Run by setuptools at build time. The `...` in a struct makes cffi take its layout from the C compiler, so the
header is the one definition.
"""

import cffi

ffi = cffi.FFI()

ffi.cdef("""
typedef struct { uint64_t word0; uint64_t word1; ...; } ProxycclTrigger;

#define PROXYCCL_MAX_TRIGGER_BYTES ...
#define PROXYCCL_WINDOW_BYTES ...
#define PROXYCCL_NO_PEER ...
#define PROXYCCL_NO_CHANNEL ...
enum { PROXYCCL_OP_CUSTOM, PROXYCCL_OP_DATA, PROXYCCL_OP_SIGNAL, PROXYCCL_OP_FLUSH, PROXYCCL_OP_GET, ... };
enum { PROXYCCL_SIZE_BITS, PROXYCCL_OFFSET_BITS, PROXYCCL_MEMORY_BITS, PROXYCCL_OP_BITS, PROXYCCL_CHANNEL_BITS,
       PROXYCCL_MAX_MEMORIES, PROXYCCL_MAX_CHANNELS, ... };
enum { PROXYCCL_SIZE_SHIFT, PROXYCCL_GET_SHIFT, PROXYCCL_SRC_OFFSET_SHIFT, PROXYCCL_DST_OFFSET_SHIFT,
       PROXYCCL_SRC_MEMORY_SHIFT,
       PROXYCCL_DST_MEMORY_SHIFT, PROXYCCL_OP_SHIFT, PROXYCCL_CHANNEL_SHIFT, PROXYCCL_PARITY_SHIFT, ... };
enum { PROXYCCL_OK, PROXYCCL_ERROR_TIMEOUT, PROXYCCL_ERROR_PEER_LOST, PROXYCCL_ERROR_TRANSPORT,
       PROXYCCL_ERROR_BAD_TRIGGER, PROXYCCL_ERROR_HANDLER, PROXYCCL_ERROR_MISMATCH, PROXYCCL_ERROR_INVALID_FLAG,
       PROXYCCL_ERROR_LOCAL, PROXYCCL_ERROR_PROXY_LOST, PROXYCCL_ERROR_OUT_OF_RANGE,
       PROXYCCL_ERROR_SHARED_WAIT, PROXYCCL_ERROR_BAD_SCHEDULE, PROXYCCL_ERROR_TRANSFER_SIZE, PROXYCCL_ERROR_PARENT,
       PROXYCCL_ERROR_CONTEXT_LOST, PROXYCCL_ERROR_SIGNAL_VALUE,
       ... };
enum { PROXYCCL_SM_PUT, PROXYCCL_SM_GET, PROXYCCL_SM_PUT_PACKETS, PROXYCCL_SM_GET_PACKETS,
       PROXYCCL_SM_COPY_TO_PACKETS, PROXYCCL_SM_COPY_FROM_PACKETS, ... };
enum { PROXYCCL_SM_PEER_MEMORY, PROXYCCL_SM_OWN_MEMORY, PROXYCCL_SM_PACKET_BUFFER, ... };
enum { PROXYCCL_WAIT_NONE, PROXYCCL_WAIT_RING_ROOM, PROXYCCL_WAIT_RING_SYNC, PROXYCCL_WAIT_FLUSH,
       PROXYCCL_WAIT_SM_SIGNAL, PROXYCCL_WAIT_PROXY_SIGNAL, PROXYCCL_WAIT_PACKET, PROXYCCL_WAIT_GRID,
       PROXYCCL_WAIT_SCHEDULE_POST, PROXYCCL_WAIT_SCHEDULE_DATA, PROXYCCL_WAIT_SCHEDULE_SEND,
       PROXYCCL_WAIT_SCHEDULE_GATE, PROXYCCL_WAIT_CONDITION, PROXYCCL_WAIT_EXECUTION, PROXYCCL_WAIT_COMPLETION,
       PROXYCCL_WAIT_STAGE,
       ... };
enum { PROXYCCL_HANDLE_NONE, PROXYCCL_HANDLE_SM_CHANNEL, PROXYCCL_HANDLE_PROXY_CHANNEL, PROXYCCL_HANDLE_SEMAPHORE,
       PROXYCCL_HANDLE_SM_SEMAPHORE, PROXYCCL_HANDLE_PROXY_SEMAPHORE, PROXYCCL_HANDLE_FIFO, ... };
enum { PROXYCCL_PRESENT, PROXYCCL_CLOSING_ANOTHER, PROXYCCL_LEFT, PROXYCCL_STOPPED, ... };
enum { PROXYCCL_RECORD_EMPTY, PROXYCCL_RECORD_CLAIMED, PROXYCCL_RECORD_VALID, ... };

typedef struct {
  uint32_t state; uint32_t code; uint32_t rank; uint32_t peer; uint32_t wait; uint32_t operation; uint32_t channel;
  int32_t status; uint64_t expected; uint64_t seen; uint64_t offset; uint64_t size; ...;
} ProxycclErrorRecord;
typedef struct {
  uint32_t claimed; uint32_t answered; uint32_t kind; uint32_t peer; uint32_t channel; uint64_t expected; uint64_t seen;
  ...;
} ProxycclWait;
enum { PROXYCCL_WAIT_PEERS, PROXYCCL_WAIT_PLACES, ... };
#define PROXYCCL_LAST_QUESTION ...
typedef struct ProxycclControl {
  uint32_t abort; uint32_t asked; uint32_t rank; uint32_t failed_rank; uint64_t timeout_ns; ProxycclErrorRecord error;
  struct ProxycclControl *const *peers; uint32_t peer_count; ProxycclWait waits[...]; ...;
} ProxycclControl;

typedef struct {
  ProxycclTrigger *slots; uint64_t *tail; uint64_t *head; uint64_t *tail_cache; uint32_t *refresh_lock;
  uint32_t size_log2; uint32_t size; uint64_t size_mask; ...;
} ProxycclFifo;
typedef struct { uint64_t *inbound; uint64_t *expected; uint64_t *remote_inbound; uint64_t *outbound;
  uint64_t adds; ...; }
ProxycclSemaphore; typedef struct {
  ProxycclSemaphore semaphore; char *dst; char *src; char *packet_buffer; ProxycclControl *control; uint64_t dst_bytes;
  uint64_t src_bytes; uint64_t packet_buffer_bytes; uint32_t peer; uint32_t channel; ...;
} ProxycclSmChannel;
typedef struct {
  ProxycclFifo fifo; ProxycclSemaphore semaphore; uint64_t *flushed; uint64_t *completed;
  const uint64_t *memory_limits;
  ProxycclControl *control;
  uint32_t channel; uint32_t peer; uint32_t dst_memory; uint32_t src_memory; ...;
} ProxycclProxyChannel;

typedef struct {
  ProxycclSemaphore semaphore; ProxycclProxyChannel proxy; char *remote; uint32_t proxied; uint32_t peer; ...;
} ProxycclLink;
typedef struct { ...; } ProxycclTeamCounters;
typedef struct {
  uint32_t rank; uint32_t world_size; uint32_t divisor; uint32_t lanes; ProxycclControl *control; ProxycclLink *links;
  ProxycclTeamCounters *counters; uint32_t *epochs; char *scratch; char *proxied; uint64_t exchange_bytes;
  uint64_t pipeline_bytes; uint64_t outputs_offset; uint64_t staging_offset; uint64_t one_crossing_bytes;
  uint64_t share; uint64_t piece; uint64_t pieces; uint64_t slot_bytes; uint32_t meet; uint32_t offers;
  char *remote[...]; char *reached_at[...]; ...;
} ProxycclTeam;
enum { PROXYCCL_ROUND_BUFFERS, PROXYCCL_PIPELINE_BUFFERS, PROXYCCL_MAX_MAPPED_RANKS, PROXYCCL_MAX_BLOCK_THREADS, ... };
enum { PROXYCCL_FLOW_SLOTS, PROXYCCL_FLOW_HEADER_BYTES, PROXYCCL_MAX_TRANSFERS, ... };
typedef struct {
  const char *src; char *dst; uint64_t bytes; uint64_t lane_bytes; uint32_t peer; uint32_t lanes; ...;
} ProxycclTransfer;
typedef struct {
  uint32_t rank; uint32_t world_size; uint32_t lanes; uint32_t count; ProxycclControl *control; ProxycclLink *links;
  uint64_t *pieces; char *scratch; uint64_t slot_bytes; uint64_t staging_offset; ProxycclTransfer transfers[...]; ...;
} ProxycclFlows;
enum { PROXYCCL_MAX_PACKET_RANKS, PROXYCCL_PACKET_SLOTS_PER_RANK, ... };
typedef struct {
  uint32_t rank; uint32_t world_size; uint32_t slot_packets; uint32_t epoch_packets; uint32_t call_epochs;
  uint64_t share; ProxycclControl *control; uint32_t *epochs; char *scratch; char *remote[...]; ...;
} ProxycclPacketTeam;
typedef struct {
  const char *slots; uint64_t slot_bytes; uint32_t rank; uint32_t world_size; uint32_t divisor; uint32_t pieces;
  uint32_t chunks; uint64_t chunk; uint64_t piece; uint64_t *stages; uint64_t *joined; uint64_t transfers;
  uint64_t first; uint64_t *gate; uint32_t *chunks_done; uint32_t *here; uint32_t *taken; uint32_t *blocks_done;
  uint32_t *opened; ProxycclControl *control; ...;
} ProxycclArrived;

enum { PROXYCCL_STEP_SYNC, PROXYCCL_STEP_BARRIER, PROXYCCL_STEP_SIGNAL, PROXYCCL_STEP_RELAXED_SIGNAL,
       PROXYCCL_STEP_WAIT, PROXYCCL_STEP_RELAXED_WAIT, PROXYCCL_STEP_PORT, PROXYCCL_STEP_PORT_WAIT,
       PROXYCCL_STEP_ACQUIRE, PROXYCCL_STEP_RELEASE, PROXYCCL_STEP_COPY, PROXYCCL_STEP_COMBINE,
       PROXYCCL_STEP_AWAIT_PACKETS, PROXYCCL_STEP_LOOP, PROXYCCL_STEP_END, ... };
enum { PROXYCCL_COMBINE_SUM, PROXYCCL_COMBINE_PROD, PROXYCCL_COMBINE_MIN, PROXYCCL_COMBINE_MAX, ... };
enum { PROXYCCL_PLACE_OPERATION_BITS, ... };
enum { PROXYCCL_BASE_NONE, PROXYCCL_BASE_INPUT, PROXYCCL_BASE_OUTPUT, ... };
typedef struct { uint64_t address; uint32_t base; uint32_t packets; uint32_t alternates; ...; } ProxycclOperand;
typedef struct {
  uint32_t code; uint32_t place; uint32_t thread; uint32_t channel; uint32_t option; uint32_t sources;
  uint32_t destinations; uint32_t first_operand; uint64_t bytes; uint64_t unit; uint32_t iterations; uint32_t packets;
  uint32_t dst_memory; uint32_t src_memory; uint64_t dst_offset; uint64_t src_offset; uint32_t dst_alternates;
  uint32_t src_alternates; ProxycclSemaphore semaphore; ...;
} ProxycclStep;
typedef struct { uint64_t executions; ...; } ProxycclExecutionCounters;
typedef struct {
  ProxycclControl *control; char *input; char *output; const ProxycclStep *steps;
  const ProxycclOperand *operands; uint32_t block_steps; uint32_t block_operands;
  const ProxycclProxyChannel *port_channels; uint32_t *barriers; int32_t *semaphores;
  ProxycclExecutionCounters *counters; uint64_t alternate_bytes; ...;
} ProxycclExecution;

enum { PROXYCCL_MAX_TOPK, PROXYCCL_EXPERT_THREADS, PROXYCCL_MAX_EXPERT_RANKS, PROXYCCL_SCALED_ELEMENTS,
       PROXYCCL_ANNOUNCED_SLOTS, PROXYCCL_ANNOUNCED_OWN_SLOTS, PROXYCCL_ANNOUNCED_SEGMENT_SLOTS,
       PROXYCCL_ANNOUNCED_EXPERTS, PROXYCCL_IDS_PER_PACKET, PROXYCCL_MASKED_RANKS, PROXYCCL_ANNOUNCED_PAYLOADS,
       PROXYCCL_SUMMED_WORDS, PROXYCCL_KEPT_TARGETS, PROXYCCL_EXPERT_COUNTERS,
       PROXYCCL_EXPERT_ROUTE, PROXYCCL_EXPERT_GATHER, PROXYCCL_EXPERT_SEND, PROXYCCL_EXPERT_RECEIVE,
       PROXYCCL_EXPERT_LAYOUT, PROXYCCL_EXPERT_TELL, PROXYCCL_NUMBER_DROPS, PROXYCCL_MINUS_ONE_DROPS, PROXYCCL_NO_ROW,
       PROXYCCL_PAST_END, ... };
typedef struct { uint32_t tokens; uint32_t bad_slot; ...; } ProxycclExpertSegment;
typedef struct { uint32_t expert; uint32_t position; ...; } ProxycclExpertSlot;
typedef struct { int32_t expert; float weight; ...; } ProxycclExpertChoice;
typedef struct {
  uint64_t ticket; uint32_t rows; uint32_t bad_rank; uint32_t bad_slot; uint32_t bad_index; uint32_t most_rows;
  uint32_t wanted_tokens; ...;
} ProxycclReceivedRows;
typedef struct {
  uint64_t dispatches; uint64_t combines; uint64_t routings; uint32_t has_failed; ...;
} ProxycclExpertCounters;
typedef struct {
  uint32_t rank; uint32_t world_size; uint32_t local_rank; uint32_t local_size; uint32_t node; uint32_t nodes;
  const uint32_t *places; const uint32_t *members; uint32_t experts_per_rank; uint32_t topk; uint32_t max_tokens;
  uint32_t blocks; uint32_t segments; uint32_t segment_tokens;
  uint32_t local_combine; uint32_t weight_bytes; uint32_t chosen_per_rank; uint32_t padded_rows;
  uint32_t expert_alignment; uint32_t choice_packets; uint32_t weight_packets; uint32_t output_buffers;
  uint32_t output_rows; uint32_t senders; uint32_t kept_calls; uint32_t dropping_ids; uint32_t batch_tokens;
  uint64_t segment_bytes; uint64_t return_segment_bytes; uint64_t counts_offset; uint64_t slots_offset;
  uint64_t places_offset; uint64_t weights_offset; uint64_t routing_bytes; uint64_t slab_bytes;
  uint64_t least_message;
  uint64_t announced; uint64_t inbox;
  uint64_t rail; uint64_t outbox; uint64_t returns; uint64_t return_rails; uint64_t partial_in; uint64_t partial_out;
  uint64_t partial_bytes; uint64_t outputs; uint64_t output_bytes; uint64_t output_scales;
  uint64_t routed; uint64_t sent; uint64_t read; uint64_t returned; uint64_t summed; uint64_t loadable;
  uint64_t crossed;
  ProxycclControl *control; char *workspace; char *const *peers; const ProxycclProxyChannel *routing_channels;
  const ProxycclProxyChannel *out_channels;
  const ProxycclProxyChannel *back_channels; uint32_t *arrivals; uint32_t *bases; ProxycclReceivedRows *received_rows;
  uint32_t *chosen_rows; ProxycclExpertCounters *counters; ...;
} ProxycclExperts;
typedef struct {
  int32_t *tokens; int32_t *counts; int32_t *rows; int32_t *places; int32_t *sent_places; int32_t *expert_ids;
  int32_t *first_rows; int32_t *token_rows; int32_t *row_slots; int32_t *row_tokens; int32_t *row_experts;
  int32_t *expert_rows; int32_t *sent_rows; ...;
} ProxycclExpertLayout;
typedef struct {
  uint32_t phases; uint32_t tokens; uint32_t capacity; uint32_t redispatch; uint64_t ticket; uint32_t wanted_tokens;
  uint32_t scale_bytes; uint32_t scale_column; uint32_t id_bytes; uint32_t output_buffer;
  uint32_t padded_rows; uint64_t row_bytes;
  const char *input; const char *expert_ids; const char *weights; const int32_t *scatter; uint64_t scatter_tokens;
  char *output; char *output_scales; char *output_weights; int32_t *received; ProxycclExpertLayout layout; ...;
} ProxycclDispatch;
typedef struct {
  uint32_t phases; uint32_t tokens; uint64_t hidden; uint32_t rows_buffer; const char *rows; const float *weights;
  const float *slot_weights; const char *added[2]; const char *order_ids; uint64_t id_bytes; char *output;
  ProxycclExpertLayout layout; ...;
} ProxycclCombine;
typedef struct {
  uint64_t rows; uint64_t hidden; char *values; const float *weights; const char *others; float *products;
  const int32_t *received; const int32_t *row_slots; ...;
} ProxycclWeighing;

enum { PROXYCCL_LAYOUT_TABLES, PROXYCCL_ADDED, ... };
void proxyccl_expert_place(ProxycclExpertLayout *layout, uintptr_t array, const uint64_t *offsets);
void proxyccl_expert_dispatch_send(ProxycclDispatch *call, uint32_t phases, uint64_t ticket, uint32_t tokens,
                                   uintptr_t input, uintptr_t expert_ids, uintptr_t weights, uint32_t output_buffer);
void proxyccl_expert_dispatch_receive(ProxycclDispatch *call, uint32_t phases, uint32_t capacity, uint32_t scale_bytes,
                                      uintptr_t output, uintptr_t output_scales, uintptr_t output_weights,
                                      uintptr_t received);
void proxyccl_expert_combine_fill(ProxycclCombine *call, uint32_t phases, uint32_t tokens, uintptr_t rows,
                                  uint32_t rows_buffer, uintptr_t weights, uintptr_t slot_weights, uintptr_t output);
void proxyccl_expert_combine_order(ProxycclCombine *call, uintptr_t added, uintptr_t also_added, uintptr_t ids,
                                   uint32_t id_bytes);

enum { PROXYCCL_HOST_SUCCESS, PROXYCCL_HOST_INVALID_VALUE, PROXYCCL_HOST_OUT_OF_MEMORY, PROXYCCL_HOST_NOT_FOUND,
       PROXYCCL_HOST_NOT_READY, PROXYCCL_HOST_IN_HANDLER, PROXYCCL_HOST_LAUNCH_FAILED,
       PROXYCCL_HOST_MAX_THREADS_PER_BLOCK, PROXYCCL_HOST_MAX_RESIDENT_BLOCKS, PROXYCCL_HOST_MAX_SHARED_BYTES,
       PROXYCCL_HOST_BUFFER_ID, ... };
enum { PROXYCCL_HOST_QUEUED, PROXYCCL_HOST_INLINE, PROXYCCL_HOST_IN_CALLER, ... };
int proxyccl_host_stream_create(void **stream, int kind);
int proxyccl_host_stream_destroy(void *stream);
int proxyccl_host_stream_query(void *stream);
int proxyccl_host_stream_synchronize(void *stream);
int proxyccl_host_stream_await(void *stream, uint64_t *target, unsigned milliseconds);
int proxyccl_host_stream_wait_event(void *stream, void *event, unsigned flags);
int proxyccl_host_event_create(void **event);
int proxyccl_host_event_destroy(void *event);
int proxyccl_host_event_record(void *event, void *stream);
int proxyccl_host_event_query(void *event);
int proxyccl_host_event_await(void *event, uint64_t *target, unsigned milliseconds);
int proxyccl_host_event_elapsed(float *milliseconds, void *start, void *end);
int proxyccl_host_copy(void *dst, const void *src, size_t bytes, void *stream);
void proxyccl_memmove(void *dst, const void *src, size_t bytes);
int proxyccl_host_set(void *dst, int value, size_t bytes, void *stream);
int proxyccl_host_write64(void *stream, uint64_t *address, uint64_t value, unsigned flags);
int proxyccl_host_write32(void *stream, uint32_t *address, uint32_t value, unsigned flags);
int proxyccl_host_module_load(void **module, const char *path);
int proxyccl_host_module_unload(void *module);
const char *proxyccl_host_module_error(void);
int proxyccl_host_module_function(void **function, void *module, const char *name);
void *proxyccl_host_module_variable(void *module, const char *name);
const uint32_t *proxyccl_host_function_parameters(void *function);
int proxyccl_host_launch(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                         void **extra);
int proxyccl_host_memory_create(int *descriptor, size_t bytes);
int proxyccl_host_memory_map(void **address, int descriptor, size_t bytes);
int proxyccl_host_memory_unmap(void *address, size_t bytes);
void proxyccl_host_memory_use_huge_pages(uint64_t ptr, size_t bytes);
int proxyccl_host_allocate(uint64_t *ptr, size_t bytes);
int proxyccl_host_free(uintptr_t ptr);
int proxyccl_host_allocation(uint64_t ptr, uint64_t *base, uint64_t *bytes, int *descriptor);
int proxyccl_host_pointer_attribute(void *data, int attribute, uint64_t ptr);

typedef struct { unsigned flags; uint64_t context; int relaxed; ...; } ProxycclPoolCalls;
typedef struct { uint64_t number; uint64_t ptr; uint64_t bytes; uint32_t freed; ...; } ProxycclSegment;
void proxyccl_pool_calls_fill(ProxycclPoolCalls *calls, uintptr_t allocate, uintptr_t allocate_with_flags,
                              uintptr_t free, uintptr_t current, uintptr_t make_current,
                              uintptr_t exchange_capture_mode);
int proxyccl_pool_configure(int device, const ProxycclPoolCalls *calls);
uint64_t proxyccl_pool_changes(int device);
size_t proxyccl_pool_segments(int device, ProxycclSegment *segments, size_t room);
int proxyccl_pool_hold(int device, uint64_t number);
uint64_t proxyccl_pool_release(int device, uint64_t number);

typedef struct ProxycclPlaces ProxycclPlaces;
ProxycclPlaces *proxyccl_places_open(uint64_t start, uint64_t bytes, uint32_t count);
void proxyccl_places_choose(ProxycclPlaces *places);
uint64_t proxyccl_places_idle(ProxycclPlaces *places);
void proxyccl_places_renew(ProxycclPlaces *places, uint64_t last);
int proxyccl_places_close(ProxycclPlaces *places);

typedef struct {
  int attribute; const uint64_t *ptrs; const uint64_t *ids; uint32_t count; ...;
} ProxycclAllocationGuard;
void proxyccl_allocation_guard_fill(ProxycclAllocationGuard *guard, uintptr_t pointer_attribute);
int proxyccl_allocations_hold(const ProxycclAllocationGuard *guard, uint64_t start, uint64_t end);
uintptr_t proxyccl_allocations_hold_address(void);

enum { PROXYCCL_MOST_SLEEPERS, ... };
typedef struct { uint32_t count; ...; } ProxycclSleepers;
int proxyccl_sleepers_add(ProxycclSleepers *sleepers, uint32_t *asleep);

typedef enum { PROXYCCL_STREAM_WAIT, PROXYCCL_STREAM_WRITE, ... } ProxycclStreamOperationKind;
typedef struct { uint32_t kind; uint64_t address; uint64_t value; ...; } ProxycclStreamOperation;
typedef struct {
  uint64_t context; void *function; unsigned grid[3]; unsigned block[3]; unsigned shared_bytes; void **parameters;
  const ProxycclSleepers *const *wakes; ...;
} ProxycclLaunch;
typedef struct {
  uint32_t words; const ProxycclLaunch *launch; uint64_t dst; uint64_t src; uint64_t bytes;
} ProxycclStreamStep;
typedef struct {
  uint64_t context; ProxycclStreamOperation *words; const ProxycclStreamStep *steps; uint32_t count; uint32_t captured;
  const ProxycclSleepers *const *wakes; ...;
} ProxycclStreamOperations;
void proxyccl_host_add_helper(int (*help)(void *, int), void *argument);
void proxyccl_host_remove_helper(void *argument);
void proxyccl_host_look_around(uint64_t thread, void (*look)(void *));
int proxyccl_host_is_looking(void);
int proxyccl_driver_await(uintptr_t query, uintptr_t handle, unsigned milliseconds);
int proxyccl_host_stream_operations(void *stream, unsigned count, ProxycclStreamOperation *operations, unsigned flags);
void proxyccl_stream_operations_fill(ProxycclStreamOperations *operations, uintptr_t batch, uintptr_t write64,
                                     uintptr_t wait64, uintptr_t copy, uintptr_t set, uintptr_t is_capturing,
                                     uintptr_t current);
int proxyccl_stream_issue(ProxycclStreamOperations *operations, uintptr_t stream);

enum { PROXYCCL_OTHER_CONTEXT, ... };
typedef struct { int relaxed; uint64_t context; ...; } ProxycclStreamOrder;
void proxyccl_stream_order_fill(ProxycclStreamOrder *order, uintptr_t record, uintptr_t wait, uintptr_t query,
                                uintptr_t is_capturing, uintptr_t exchange_capture_mode, uintptr_t current);
int proxyccl_stream_captures(const ProxycclStreamOrder *order, uintptr_t stream);
int proxyccl_stream_ask_capture(const ProxycclStreamOrder *order, uintptr_t stream, int *captures);
int proxyccl_stream_mark(const ProxycclStreamOrder *order, uintptr_t event, uintptr_t stream);
int proxyccl_stream_wait(const ProxycclStreamOrder *order, uintptr_t stream, uintptr_t event);
int proxyccl_stream_follow(const ProxycclStreamOrder *order, uintptr_t event, uintptr_t first, uintptr_t then,
                           int alike);
int proxyccl_event_query(const ProxycclStreamOrder *order, uintptr_t event);
void proxyccl_launch_fill(ProxycclLaunch *launch, uintptr_t call, uintptr_t current);
int proxyccl_launch(const ProxycclLaunch *launch, uintptr_t stream);

void proxyccl_control_raise(ProxycclControl *control, const ProxycclErrorRecord *record, ProxycclControl *const *peers,
                            uint32_t peer_count);
uint32_t proxyccl_control_abort(const ProxycclControl *control);
uint32_t proxyccl_control_failed_rank(const ProxycclControl *control);
uint32_t proxyccl_control_record(const ProxycclControl *control, ProxycclErrorRecord *record);
void proxyccl_control_set_presence(ProxycclControl *control, uint32_t presence, uint32_t exchanges);
uint32_t proxyccl_control_exchanges(const ProxycclControl *control);
uint32_t proxyccl_control_presence(const ProxycclControl *control);
void proxyccl_control_ask(ProxycclControl *control, uint32_t question);
int proxyccl_control_wait(const ProxycclControl *control, uint32_t place, uint32_t question, ProxycclWait *wait);
""")

ffi.set_source(
    "proxyccl.device._native",
    """
#include <sched.h>
#include <time.h>

#include "proxyccl/handles.h"
#include "proxyccl/platform_host_memmove.h"
#include "arrived.h"
#include "execution.h"
#include "team.h"
#include "flows.h"
#include "packet_team.h"
#include "expert_calls.h"
#include "experts/experts.h"
#include "runtime.h"
#include "launch.h"
#include "memory_pool.h"
#include "places.h"
#include "allocation_guard.h"
#include "stream_order.h"

/* Drivers' entry points arrive as addresses. */
static void proxyccl_launch_fill(ProxycclLaunch *launch, uintptr_t call, uintptr_t current) {
  launch->call = (int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **))call;
  launch->current = (int (*)(uint64_t *))current;
}
static void proxyccl_stream_operations_fill(ProxycclStreamOperations *operations, uintptr_t batch, uintptr_t write64,
                                            uintptr_t wait64, uintptr_t copy, uintptr_t set, uintptr_t is_capturing,
                                            uintptr_t current) {
  operations->batch = (int (*)(void *, unsigned, ProxycclStreamOperation *, unsigned))batch;
  operations->write64 = (int (*)(void *, uint64_t *, uint64_t, unsigned))write64;
  operations->wait64 = (int (*)(void *, uint64_t *, uint64_t, unsigned, uint64_t))wait64;
  operations->copy = (int (*)(uint64_t, uint64_t, size_t, void *))copy;
  operations->set = (int (*)(uint64_t, int, size_t, void *))set;
  operations->is_capturing = (int (*)(void *, int *))is_capturing;
  operations->current = (int (*)(uint64_t *))current;
}
static void proxyccl_stream_order_fill(ProxycclStreamOrder *order, uintptr_t record, uintptr_t wait, uintptr_t query,
                                       uintptr_t is_capturing, uintptr_t exchange_capture_mode, uintptr_t current) {
  order->record = (int (*)(void *, void *))record;
  order->wait = (int (*)(void *, void *, unsigned))wait;
  order->query = (int (*)(void *))query;
  order->is_capturing = (int (*)(void *, int *))is_capturing;
  order->exchange_capture_mode = (int (*)(int *))exchange_capture_mode;
  order->current = (int (*)(uint64_t *))current;
}
static void proxyccl_pool_calls_fill(ProxycclPoolCalls *calls, uintptr_t allocate, uintptr_t allocate_with_flags,
                                     uintptr_t free, uintptr_t current, uintptr_t make_current,
                                     uintptr_t exchange_capture_mode) {
  calls->allocate = (int (*)(uint64_t *, size_t))allocate;
  calls->allocate_with_flags = (int (*)(void **, size_t, unsigned))allocate_with_flags;
  calls->free = (int (*)(uintptr_t))free;
  calls->current = (int (*)(uint64_t *))current;
  calls->make_current = (int (*)(uintptr_t))make_current;
  calls->exchange_capture_mode = (int (*)(int *))exchange_capture_mode;
}
/* Asks a driver for a stream or an event until that is done, for some milliseconds at most. query is cuStreamQuery,
 * cuEventQuery or hip's. Returns its last status; they all answer PROXYCCL_HOST_NOT_READY while it is not done. */
static int proxyccl_driver_await(uintptr_t query, uintptr_t handle, unsigned milliseconds) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end = now.tv_sec * 1000000000ll + now.tv_nsec + milliseconds * 1000000ll;
  for (;;) {
    const int status = ((int (*)(void *))query)((void *)handle);
    if (status != PROXYCCL_HOST_NOT_READY) return status;
    sched_yield();
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec * 1000000000ll + now.tv_nsec > end) return status;
  }
}
/* For callers in C of other extensions. */
static uintptr_t proxyccl_allocations_hold_address(void) { return (uintptr_t)proxyccl_allocations_hold; }
static void proxyccl_allocation_guard_fill(ProxycclAllocationGuard *guard, uintptr_t pointer_attribute) {
  guard->pointer_attribute = (int (*)(void *, int, uint64_t))pointer_attribute;
}
/* Files the record, if no other has been filed, and ends the waits of all ranks of the host: recordError() of wait.h,
 * for the CPU, with the peers' control blocks by its own addresses. */
static void proxyccl_control_raise(ProxycclControl *control, const ProxycclErrorRecord *record,
                                   ProxycclControl *const *peers, uint32_t peer_count) {
  uint32_t *state = &control->error.state, empty = PROXYCCL_RECORD_EMPTY;
  if (__atomic_compare_exchange_n(state, &empty, PROXYCCL_RECORD_CLAIMED, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    /* All but the state, which is the record's first word. */
    __builtin_memcpy(state + 1, (const uint32_t *)record + 1, sizeof *record - sizeof *state);
    /* Pairs with the acquire in proxyccl_control_record(). */
    __atomic_store_n(state, PROXYCCL_RECORD_VALID, __ATOMIC_RELEASE);
  }
  for (uint32_t i = 0; i < peer_count; ++i) {
    uint32_t nobody = 0;
    uint32_t *failed_rank = &peers[i]->failed_rank;
    __atomic_compare_exchange_n(failed_rank, &nobody, control->rank + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
  for (uint32_t i = 0; i < peer_count; ++i) __atomic_store_n(&peers[i]->abort, record->code, __ATOMIC_RELEASE);
  __atomic_store_n(&control->abort, record->code, __ATOMIC_RELEASE);
}
static uint32_t proxyccl_control_abort(const ProxycclControl *control) {
  return __atomic_load_n(&control->abort, __ATOMIC_ACQUIRE);
}
/* One more than the rank of this host whose record says why this one must end; 0: there is none. */
static uint32_t proxyccl_control_failed_rank(const ProxycclControl *control) {
  return __atomic_load_n(&control->failed_rank, __ATOMIC_ACQUIRE);
}
/* Copies the record if it is valid. Returns its state. */
static uint32_t proxyccl_control_record(const ProxycclControl *control, ProxycclErrorRecord *record) {
  const uint32_t state = __atomic_load_n(&control->error.state, __ATOMIC_ACQUIRE);
  if (state == PROXYCCL_RECORD_VALID)
    __builtin_memcpy((uint32_t *)record + 1, (const uint32_t *)&control->error + 1, sizeof *record - sizeof state);
  return state;
}
/* Released after the rank's last use of its peers' memory; pairs with the acquire below. */
static void proxyccl_control_set_presence(ProxycclControl *control, uint32_t presence, uint32_t exchanges) {
  __atomic_store_n(&control->exchanges, exchanges, __ATOMIC_RELAXED);
  __atomic_store_n(&control->presence, presence, __ATOMIC_RELEASE);
}
static uint32_t proxyccl_control_presence(const ProxycclControl *control) {
  return __atomic_load_n(&control->presence, __ATOMIC_ACQUIRE);
}
/* Read after a presence of PROXYCCL_LEFT. */
static uint32_t proxyccl_control_exchanges(const ProxycclControl *control) {
  return __atomic_load_n(&control->exchanges, __ATOMIC_RELAXED);
}
static void proxyccl_control_ask(ProxycclControl *control, uint32_t question) {
  __atomic_store_n(&control->asked, question, __ATOMIC_RELAXED);
}
/* Copies the answer of the wait in this place to a question. Returns whether there is one. */
static int proxyccl_control_wait(const ProxycclControl *control, uint32_t place, uint32_t question,
                                 ProxycclWait *wait) {
  /* Pairs with the release in describeWait(). */
  if (__atomic_load_n(&control->waits[place].answered, __ATOMIC_ACQUIRE) != question) return 0;
  *wait = control->waits[place];
  return 1;
}
""",
    source_extension=".cpp",
    sources=[
        "device/host/fibers.cpp",
        "device/host/streams.cpp",
        "device/host/waiting.cpp",
        "device/host/memory.cpp",
        "device/memory/memory_pool.cpp",
        "device/memory/places.cpp",
    ],
    depends=[
        "device/launch.h",
        "device/expert_calls.h",
        "device/waking.h",
        "device/memory/memory_pool.h",
        "device/memory/places.h",
        "device/memory/allocation_guard.h",
        "device/stream_order.h",
        "device/stream_operations.h",
        "device/host/runtime.h",
        "device/host/fibers.h",
        "device/host/status.h",
        "device/host/link_old_symbols.h",
        "device/include/proxyccl/handles.h",
        "device/include/proxyccl/platform_host_memmove.h",
        "device/kernels/arrived.h",
        "device/kernels/execution.h",
        "device/kernels/team.h",
        "device/kernels/flows.h",
        "device/kernels/packet_team.h",
        "device/kernels/experts/experts.h",
    ],
    include_dirs=["device", "device/memory", "device/include", "device/host", "device/kernels"],
    # The emulator tells ThreadSanitizer about its fibers and must not be instrumented itself.
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-fno-sanitize=thread"],
    extra_link_args=["-pthread"],
)
