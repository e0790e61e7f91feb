/* Opens libfabric's objects for Python: providers' offers, an endpoint, registered memory, peers' addresses.
 *
 * Python loads the library; this file has the parts that need its headers. Functions that return an int return 0, or
 * the number of libfabric's error, unless they say otherwise. */
#ifndef PROXYCCL_FABRIC_OBJECTS_H
#define PROXYCCL_FABRIC_OBJECTS_H

#include <stdint.h>

/* Addresses of the library's functions, of the same names. */
typedef struct ProxycclFabricLibrary {
  uintptr_t fi_getinfo, fi_freeinfo, fi_dupinfo, fi_fabric;
} ProxycclFabricLibrary;

/* A provider's description of an endpoint that it can make. Strings and addresses live as long as the list of offers.
 */
typedef struct ProxycclFabricOffer {
  const char *provider, *domain;
  const void *source; /* the endpoint's own address, `source_bytes` of `address_format`; NULL if not known yet */
  uint32_t source_bytes, address_format;
  uint32_t ordered;       /* writes reach the peer's memory in the order of their posts */
  uint32_t parts;         /* most ranges of memory in one write, on each side */
  uint32_t reads;         /* the endpoint also supports reads */
  uint32_t remote;        /* the endpoint reaches other hosts */
  uint32_t device_memory; /* memory of GPUs can be registered, if the library supports these GPUs */
  uint32_t virtual_keys;  /* peers name registered memory by addresses; otherwise by offsets */
  uint32_t provider_keys; /* the provider chooses keys; otherwise the caller does */
  uint32_t key_bytes;
  uint32_t depth; /* writes that may be outstanding */
  uint64_t max_message;
  uint64_t bits_per_second; /* the link's rate; 0: not known */
} ProxycclFabricOffer;

/* The providers' offers for writes to peers' memory. `ordered` asks for order, `reads` for reads, `device_memory` for
 * the memory of GPUs too. Freed by proxyccl_fabric_offers_free. */
typedef struct ProxycclFabricOffers ProxycclFabricOffers;
int proxyccl_fabric_offers(const ProxycclFabricLibrary *library, uint32_t ordered, uint32_t reads,
                           uint32_t device_memory, ProxycclFabricOffers **offers);
/* Stores the offer with this number, counted from 0. Returns 1, or 0 if there is no such offer. */
int proxyccl_fabric_offer(const ProxycclFabricOffers *offers, uint32_t number, ProxycclFabricOffer *offer);
void proxyccl_fabric_offers_free(ProxycclFabricOffers *offers);

/* An endpoint with its domain, completion queue and address vector, enabled. */
typedef struct ProxycclFabricEndpoint ProxycclFabricEndpoint;
typedef struct ProxycclFabricParts {
  uintptr_t endpoint, queue, fabric, peers; /* fid_ep *, fid_cq *, fid_fabric *, fid_av * */
  int32_t descriptor;                       /* readable when the queue has an entry; -1: no descriptor */
} ProxycclFabricParts;

/* `waits`: the completion queue gets a descriptor, if the provider supports one. `call` is set to the name of the call
 * that failed. */
int proxyccl_fabric_open(const ProxycclFabricLibrary *library, const ProxycclFabricOffers *offers, uint32_t number,
                         uint32_t completions, uint32_t waits, ProxycclFabricEndpoint **endpoint, const char **call);
void proxyccl_fabric_parts(const ProxycclFabricEndpoint *endpoint, ProxycclFabricParts *parts);
/* Requires that all needed requests are complete and all memory is deregistered. Returns the first error. */
int proxyccl_fabric_close(ProxycclFabricEndpoint *endpoint);

/* Stores the endpoint's address. `bytes` is the buffer's size, and is set to the address's length. */
int proxyccl_fabric_address(const ProxycclFabricEndpoint *endpoint, void *address, uint64_t *bytes);
/* Adds a peer to the address vector. `peer` is set to the peer's fi_addr_t. */
int proxyccl_fabric_insert(ProxycclFabricEndpoint *endpoint, const char *address, uint64_t *peer);
/* Removes a peer from the address vector. No request to the peer may be outstanding. */
int proxyccl_fabric_remove(ProxycclFabricEndpoint *endpoint, uint64_t peer);

typedef struct ProxycclFabricRegion {
  uintptr_t region; /* fid_mr * */
  uint64_t key;
  uintptr_t descriptor;
} ProxycclFabricRegion;

/* The kind of memory that is registered. */
typedef enum ProxycclFabricOwner {
  PROXYCCL_FABRIC_HOST = 0,
  PROXYCCL_FABRIC_CUDA = 1,
  PROXYCCL_FABRIC_ROCR = 2
} ProxycclFabricOwner;

/* Registers memory that peers write, or read if the endpoint makes reads, and that this rank's writes and reads name.
 * `key` is for providers that let the caller choose, `device` is the number of a CUDA device. */
int proxyccl_fabric_register(ProxycclFabricEndpoint *endpoint, uintptr_t address, uint64_t bytes, uint64_t key,
                             ProxycclFabricOwner owner, int32_t device, ProxycclFabricRegion *region);
int proxyccl_fabric_deregister(uintptr_t region);

#endif
