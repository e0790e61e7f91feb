#include "transports.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#define ENTRY(name) &proxyccl_##name##_transport,
static const ProxycclTransport *const transports[] = {PROXYCCL_TRANSPORTS(ENTRY)};

static const ProxycclTransport *find(const char *name) {
  for (size_t i = 0; i < sizeof transports / sizeof *transports; ++i)
    if (strcmp(transports[i]->name, name) == 0) return transports[i];
  return NULL;
}

const char *proxyccl_transport_refused(const char *name, const void *options) {
  const ProxycclTransport *transport = find(name);
  return transport == NULL ? "transport" : transport->refused(options);
}

ProxycclConnection *proxyccl_connection_create(const char *name, const void *options,
                                               const ProxycclRuntimeTable *runtime) {
  if (proxyccl_transport_refused(name, options) != NULL) {
    errno = EINVAL;
    return NULL;
  }
  return find(name)->create(options, runtime);
}

void proxyccl_connection_destroy(ProxycclConnection *connection) { connection->transport->destroy(connection); }
