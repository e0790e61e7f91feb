/* The table of all transports, by name. The engine uses transports only through their functions (transport.h). */
#pragma once

#include "transport.h"

/* <name>_transport.c defines proxyccl_<name>_transport, and <name>_transport.h defines the transport's options.
 * staged_transport.c and .h define both staged transports. */
#define PROXYCCL_TRANSPORTS(each) each(copy) each(verbs) each(fabric) each(rails) each(staged) each(staged_fabric)

#define PROXYCCL_DECLARE_TRANSPORT(name) extern const ProxycclTransport proxyccl_##name##_transport;
PROXYCCL_TRANSPORTS(PROXYCCL_DECLARE_TRANSPORT)

/* Makes a connection. `options` is the struct in the transport's header; the objects that it names must outlive the
 * connection. On failure, returns NULL. Then *refused is the name of an option that is out of range, or NULL; in the
 * latter case errno is ENOMEM, or ENOSYS if this build lacks the transport. */
ProxycclConnection *proxyccl_connection_create(const char *name, const void *options,
                                               const ProxycclRuntimeTable *runtime, const char **refused);
void proxyccl_connection_destroy(ProxycclConnection *connection); /* does nothing for NULL */
/* Returns the provider's message about the error that ended a connection; "" if there is none. */
const char *proxyccl_connection_error_text(const ProxycclConnection *connection);
