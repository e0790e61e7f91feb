/* The functions of a GPU's driver that the engine calls.
 *
 * The functions have the signatures of the driver API, which are the same in CUDA and HIP, so addresses from
 * cuda-bindings, hip-python and the host runtime are used unchanged. The engine includes no header of a driver and
 * links no driver. Each function returns 0 for success; event_query returns NOT_READY (600 in CUDA and HIP) while work
 * is outstanding. No function waits for the device. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { PROXYCCL_RUNTIME_SUCCESS = 0, PROXYCCL_RUNTIME_NOT_READY = 600 };

/* Attributes of copies, laid out as a CUmemcpyAttributes. */
typedef struct ProxycclCopyAttributes {
  uint32_t source_order;
  uint32_t hints[4]; /* hints about the locations of source and destination; 0 lets the driver find the locations */
  uint32_t flags;
} ProxycclCopyAttributes;

/* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, and CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE. */
enum { PROXYCCL_SOURCES_IN_STREAM_ORDER = 1, PROXYCCL_COPIES_BESIDE_KERNELS = 1 };

typedef struct ProxycclRuntimeTable {
  /* cuMemcpyAsync, hipMemcpyDtoDAsync */
  int (*copy)(void *dst, const void *src, size_t bytes, void *stream);
  /* cuStreamWriteValue64, hipStreamWriteValue64: stores the value after all earlier work of the stream */
  int (*write64)(void *stream, uint64_t *address, uint64_t value, unsigned flags);
  /* cuStreamWriteValue32, hipStreamWriteValue32: stores the value after all earlier work of the stream */
  int (*write32)(void *stream, uint32_t *address, uint32_t value, unsigned flags);
  /* cuEventRecord, hipEventRecord */
  int (*event_record)(void *event, void *stream);
  /* cuEventQuery, hipEventQuery */
  int (*event_query)(void *event);
  /* cuMemcpyBatchAsync of CUDA 13: makes copies in any order; NULL if the driver lacks the function. attributes[i]
   * applies to the copies from number first[i] on. */
  int (*copy_many)(uint64_t *dst, uint64_t *src, size_t *bytes, size_t count, ProxycclCopyAttributes *attributes,
                   size_t *first, size_t attribute_count, void *stream);
} ProxycclRuntimeTable;
