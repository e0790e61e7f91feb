/* The functions of a runtime that the engine calls: its only connection to a GPU driver.
 *
 * They have the driver API's own signatures, which CUDA and HIP share, so addresses from cuda-bindings, hip-python and
 * the host runtime are used unchanged. No driver header is included and nothing is linked. Each returns 0 for success;
 * event_query returns NOT_READY while work is outstanding (600 in CUDA and HIP). None of them waits for the device.
 */
#ifndef PROXYCCL_RUNTIME_TABLE_H
#define PROXYCCL_RUNTIME_TABLE_H

#include <stddef.h>
#include <stdint.h>

enum { PROXYCCL_RUNTIME_SUCCESS = 0, PROXYCCL_RUNTIME_NOT_READY = 600 };

typedef struct ProxycclRuntimeTable {
  /* cuMemcpyAsync, hipMemcpyDtoDAsync */
  int (*copy)(void *dst, const void *src, size_t bytes, void *stream);
  /* cuStreamWriteValue64, hipStreamWriteValue64: after all earlier work of the stream */
  int (*write64)(void *stream, uint64_t *address, uint64_t value, unsigned flags);
  /* cuStreamWriteValue32, hipStreamWriteValue32: likewise */
  int (*write32)(void *stream, uint32_t *address, uint32_t value, unsigned flags);
  /* cuMemsetD16Async, hipMemsetD16Async */
  int (*set16)(void *dst, unsigned short value, size_t count, void *stream);
  /* cuMemsetD8Async, hipMemsetD8Async */
  int (*set8)(void *dst, unsigned char value, size_t count, void *stream);
  /* cuEventRecord, hipEventRecord */
  int (*event_record)(void *event, void *stream);
  /* cuEventQuery, hipEventQuery */
  int (*event_query)(void *event);
} ProxycclRuntimeTable;

#endif
