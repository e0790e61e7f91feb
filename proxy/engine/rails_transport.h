/* The transport `rails` moves data to a peer over two connections of the transport `verbs` or `fabric`, called rails.
 * Each rail has its own network adapter.
 *
 * A key of memory holds one key of 32 bits for each rail: that of rail 0 in the low bits. So memory has the same
 * address on all rails. */
#ifndef PROXYCCL_RAILS_TRANSPORT_H
#define PROXYCCL_RAILS_TRANSPORT_H

#include <stdint.h>

enum {
  PROXYCCL_RAILS = 2,
  PROXYCCL_RAIL_PARTS = 256, /* most outstanding parts of a rail; a power of two */
  PROXYCCL_RAILS_ALIGN = 64  /* all parts but the last have a multiple of this many bytes */
};

/* Memory of a rank that is registered with both adapters, one for each connection over rails. */
typedef struct ProxycclRailsMail {
  uint64_t down[PROXYCCL_RAILS];       /* the peer sets a rail's word once the rail's queue pair at the peer is in its
                                          error state */
  uint64_t words[PROXYCCL_RAIL_PARTS]; /* the peer's semaphore words, read after a failure; by number of part */
} ProxycclRailsMail;

typedef struct ProxycclRailsOptions {
  const void *options[PROXYCCL_RAILS]; /* a ProxycclVerbsOptions or ProxycclFabricOptions for each rail */
  uint32_t speeds[PROXYCCL_RAILS];     /* the rails' relative speeds, from 1; a rail's part of a put is proportional */
  uint32_t cut;            /* puts and gets of at least this many bytes are cut into one part for each rail */
  uint64_t mail;           /* address of this rank's ProxycclRailsMail; 0 if a failed rail ends the connection */
  uint64_t mail_keys;      /* local keys of `mail` */
  uint64_t peer_mail;      /* address of the peer's ProxycclRailsMail */
  uint64_t peer_mail_keys; /* remote keys of `peer_mail` */
  uint32_t home;           /* number of the rail that carries short operations and signals */
  uint32_t over_fabric;    /* 1 if the rails are connections of `fabric`; 0 if they are connections of `verbs` */
} ProxycclRailsOptions;

struct ProxycclConnection;

/* Returns the number of a connection's failed rail, and sets *status to the reason; -1 if no rail has failed. */
int proxyccl_rails_failed(const struct ProxycclConnection *connection, int *status);

#endif
