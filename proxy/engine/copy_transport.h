/* Copies by a runtime's copy engine, in one stream for each peer. */
#ifndef PROXYCCL_COPY_TRANSPORT_H
#define PROXYCCL_COPY_TRANSPORT_H

#include "runtime_table.h"
#include "transport.h"

/* `stream` and `event` belong to the caller and outlive the connection. NULL when out of memory. */
ProxycclConnection *proxyccl_copy_connection(const ProxycclRuntimeTable *runtime, void *stream, void *event);

#endif
