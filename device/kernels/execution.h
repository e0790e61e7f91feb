/* An execution plan as the kernel reads it (execute_plan.h): one rank's steps of MSCCL++'s JSON plan, for one size of
 * arrays. Python fills in the structs (channels/execution_plans).
 */
#pragma once

#include "proxyccl/handles.h"

/* The kinds of steps. The thread ProxycclStep.thread of the block executes a step that needs only one thread. */
enum ProxycclStepCode {
  PROXYCCL_STEP_SYNC =
      0, /* a barrier of the block's threads, after which one thread's release covers the writes of all threads */
  PROXYCCL_STEP_BARRIER = 1, /* barrier number `channel`, in which `option` blocks take part */
  PROXYCCL_STEP_SIGNAL = 2,  /* signals a memory channel's peer */
  PROXYCCL_STEP_RELAXED_SIGNAL = 3,
  PROXYCCL_STEP_WAIT = 4,
  PROXYCCL_STEP_RELAXED_WAIT = 5,
  PROXYCCL_STEP_PORT = 6,      /* pushes a trigger with the operation `option`; waits for its flush, if any */
  PROXYCCL_STEP_PORT_WAIT = 7, /* waits for the port channel's next signal */
  PROXYCCL_STEP_ACQUIRE = 8,   /* acquires semaphore number `channel` */
  PROXYCCL_STEP_RELEASE = 9,
  PROXYCCL_STEP_COPY = 10,    /* copies operand 0 to operand 1 */
  PROXYCCL_STEP_COMBINE = 11, /* stores the sources, combined by the operation `option`, in each destination */
  PROXYCCL_STEP_AWAIT_PACKETS = 12,
  PROXYCCL_STEP_LOOP =
      13, /* repeats the next `option` (>= 1) steps `iterations` (>= 1) times, each time on `unit` bytes */
  PROXYCCL_STEP_END = 14 /* the block's last step */
};

enum ProxycclCombination {
  PROXYCCL_COMBINE_SUM = 0,
  PROXYCCL_COMBINE_PROD = 1,
  PROXYCCL_COMBINE_MIN = 2,
  PROXYCCL_COMBINE_MAX = 3
};

/* The base of an operand's address. */
enum ProxycclBase { PROXYCCL_BASE_NONE = 0, PROXYCCL_BASE_INPUT = 1, PROXYCCL_BASE_OUTPUT = 2 };

/* A range of memory that a step reads or writes. */
typedef struct ProxycclOperand {
  uint64_t address;    /* an address, or an offset from `base` */
  uint32_t base;       /* ProxycclBase */
  uint32_t packets;    /* 1: the range holds packets (LL16Packet), which take twice the bytes of their data */
  uint32_t alternates; /* 1: the range is in scratch memory, whose two halves are used by alternate executions */
  uint32_t reserved;
} ProxycclOperand;

/* An error record identifies a step by its threadblock and operation in the plan. */
enum { PROXYCCL_PLACE_OPERATION_BITS = 20 };

typedef struct ProxycclStep {
  uint32_t code;                  /* ProxycclStepCode */
  uint32_t place;                 /* threadblock << PROXYCCL_PLACE_OPERATION_BITS | operation */
  uint32_t thread;                /* the thread that executes the step; all threads execute a step that moves data */
  uint32_t channel;               /* number of a port channel, barrier or semaphore */
  uint32_t option;                /* meaning depends on `code`; the peer, if the step waits for a channel's signal */
  uint32_t sources, destinations; /* numbers of sources and of destinations, from first_operand on */
  uint32_t first_operand;
  uint64_t bytes; /* bytes of data */
  uint64_t unit;
  uint32_t iterations;
  uint32_t packets; /* not 0 if an operand holds packets */
  uint32_t dst_memory, src_memory;
  uint64_t dst_offset, src_offset;
  uint32_t dst_alternates, src_alternates;
  ProxycclSemaphore semaphore; /* the channel's semaphore, for a signal to or from its peer */
} ProxycclStep;

/* Counters in device memory; the kernel itself advances them, so that a captured graph can be replayed. */
typedef struct ProxycclExecutionCounters {
  uint64_t executions;
  uint32_t blocks_done;
  uint32_t reserved;
} ProxycclExecutionCounters;

/* The kernel's parameter, passed by value. */
typedef struct ProxycclExecution {
  ProxycclControl* control;
  char* input; /* this rank's arrays */
  char* output;
  const ProxycclStep* steps; /* block_steps steps for each block; one of them is END */
  const ProxycclOperand* operands;
  uint32_t block_steps,
      block_operands; /* equal in all blocks, so that a block finds its steps and operands without a load */
  const ProxycclProxyChannel* port_channels;
  uint32_t* barriers;  /* a DeviceSyncer (two words) for each barrier */
  int32_t* semaphores; /* a DeviceSemaphore for each semaphore */
  ProxycclExecutionCounters* counters;
  uint64_t alternate_bytes; /* offset of the scratch memory's second half; 0 if this memory is not halved */
} ProxycclExecution;
