#include "transports.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ENTRY(name) &proxyccl_##name##_transport,
static const ProxycclTransport *const transports[] = {PROXYCCL_TRANSPORTS(ENTRY)};

static const ProxycclTransport *find(const char *name) {
  for (size_t i = 0; i < sizeof transports / sizeof *transports; ++i)
    if (strcmp(transports[i]->name, name) == 0) return transports[i];
  return NULL;
}

ProxycclConnection *proxyccl_connection_create(const char *name, const void *options,
                                               const ProxycclRuntimeTable *runtime, const char **refused) {
  const ProxycclTransport *transport = find(name);
  *refused = transport == NULL ? "transport" : NULL;
  if (transport != NULL && transport->create != NULL) return transport->create(options, runtime, refused);
  errno = ENOSYS;
  return NULL;
}

const char *proxyccl_connection_error_text(const ProxycclConnection *connection) {
  return connection->transport->error_text == NULL ? "" : connection->transport->error_text(connection);
}

void proxyccl_connection_destroy(ProxycclConnection *connection) {
  if (connection == NULL || connection->transport->destroy == NULL)
    free(connection);
  else
    connection->transport->destroy(connection);
}
