/* The transport `rails` moves data to a peer over several connections of the transport `verbs` or `fabric`, called
 * rails. Each rail has its own network adapter. Memory has the same address on all rails, but a key for each rail. */
#pragma once

#include <stdint.h>

enum {
  PROXYCCL_RAILS = 8,        /* maximum number of rails of a connection */
  PROXYCCL_RAIL_PARTS = 256, /* most outstanding parts of a rail; a power of two */
  PROXYCCL_RAILS_ALIGN = 64  /* all parts but the last have a multiple of this many bytes */
};

/* Memory of a rank that is registered with all adapters, one for each connection over rails. A connection counts the
 * failures of each rail; both ranks have the same count, because each failure ends the rail at both ranks. */
typedef struct ProxycclRailsMail {
  /* Pairing rail-mail: written by the peer. */
  uint64_t down[PROXYCCL_RAILS];     /* number of the failure after which the rail's queue pair at the peer has been
                                        in its error state */
  uint64_t up[PROXYCCL_RAILS];       /* number of the failure after which the peer has connected its queue pair of the
                                        rail again */
  uint64_t executed[PROXYCCL_RAILS]; /* number of the rail's parts that are known to be executed here */
  /* Read from the peer after a failure. */
  uint64_t peer_executed;              /* the word `executed` of the failed rail */
  uint64_t words[PROXYCCL_RAIL_PARTS]; /* the peer's semaphore words, by number of part */
} ProxycclRailsMail;

typedef struct ProxycclRailsOptions {
  uint32_t count; /* number of rails, at most PROXYCCL_RAILS */
  /* A ProxycclVerbsOptions or ProxycclFabricOptions for each rail. With `mail`, these structs must outlive the
   * connection, and may be changed while the rail is free (ProxycclRailsState). */
  const void *options[PROXYCCL_RAILS];
  uint32_t speeds[PROXYCCL_RAILS]; /* relative, at least 1: a put is divided in proportion to the speeds */
  uint32_t cut;                    /* puts and gets of at least this many bytes are cut into one part for each rail */
  uint64_t mail; /* address of this rank's ProxycclRailsMail; 0 if a failed rail ends the connection */
  uint64_t mail_keys[PROXYCCL_RAILS];      /* local keys of `mail` */
  uint64_t peer_mail;                      /* address of the peer's ProxycclRailsMail */
  uint64_t peer_mail_keys[PROXYCCL_RAILS]; /* remote keys of `peer_mail` */
  uint32_t home;                           /* number of the rail that carries short operations and signals */
  uint64_t limit_ns;    /* the recovery from a failure may take this long without a completion on another rail */
  uint32_t over_fabric; /* 1 if the rails are connections of `fabric`; 0 if they are connections of `verbs` */
} ProxycclRailsOptions;

struct ProxycclConnection;

/* The state of a rail, which other threads may read at any time. */
typedef struct ProxycclRailsState {
  uint64_t failures;    /* number of failures so far */
  uint32_t is_down;     /* 1 if the rail is not in use */
  uint32_t is_stopping; /* 1 if the rail's queue pair must be put into its error state */
  uint32_t is_free;     /* 1 if the engine does not use the rail's queue pair, which may be connected again */
  int status;           /* why the rail failed last */
  uint32_t losses;      /* number of failures before which the rail was in use, modulo 128 */
} ProxycclRailsState;

void proxyccl_rails_state(const struct ProxycclConnection *connection, uint32_t rail, ProxycclRailsState *state);

/* Tell the engine that a failed rail's queue pair has been stopped (is_stopping), or connected without completions
 * left (is_free), after the failure with this number. */
void proxyccl_rails_stopped(struct ProxycclConnection *connection, uint32_t rail, uint64_t failure);
void proxyccl_rails_reconnected(struct ProxycclConnection *connection, uint32_t rail, uint64_t failure);
/* Tells the engine, for rails over `fabric`, that the adapter of a rail in use is down, which is the rail's failure
 * with this number; 0 if the adapter works. */
void proxyccl_rails_fell(struct ProxycclConnection *connection, uint32_t rail, uint64_t failure);
