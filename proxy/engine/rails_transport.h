/* The transport `rails` moves data to a peer over two connections of the transport `verbs`, called rails. Each rail has
 * its own network adapter.
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

typedef struct ProxycclRailsOptions {
  const void *options[PROXYCCL_RAILS]; /* a ProxycclVerbsOptions for each rail */
  uint32_t speeds[PROXYCCL_RAILS];     /* the rails' relative speeds, from 1; a rail's part of a put is proportional */
  uint32_t cut;  /* puts and gets of at least this many bytes are cut into one part for each rail */
  uint32_t home; /* number of the rail that carries short operations and signals */
} ProxycclRailsOptions;

#endif
