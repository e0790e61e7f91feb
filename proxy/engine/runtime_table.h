/* The calls that the engine makes into a runtime: the one seam to a GPU driver.
 *
 * The signatures are the driver API's own (CUDA's, which HIP shares), so the addresses that cuda-bindings, hip-python
 * or the host runtime give are used as they are. No driver header is included and nothing is linked. Each returns 0
 * for success; event_query returns NOT_READY while work is outstanding (600 in CUDA and HIP). The engine never makes
 * a call that waits for the device.
 */
#ifndef PROXYCCL_RUNTIME_TABLE_H
#define PROXYCCL_RUNTIME_TABLE_H

#include <stddef.h>
#include <stdint.h>

enum { PROXYCCL_RUNTIME_SUCCESS = 0, PROXYCCL_RUNTIME_NOT_READY = 600 };

typedef struct ProxycclRuntimeTable {
  /* cuMemcpyAsync, hipMemcpyDtoDAsync */
  int (*copy)(void *dst, const void *src, size_t bytes, void *stream);
  /* cuStreamWriteValue64, hipStreamWriteValue64: behind all earlier work of the stream */
  int (*write64)(void *stream, uint64_t *address, uint64_t value, unsigned flags);
  /* cuEventRecord, hipEventRecord */
  int (*event_record)(void *event, void *stream);
  /* cuEventQuery, hipEventQuery */
  int (*event_query)(void *event);
} ProxycclRuntimeTable;

#endif
