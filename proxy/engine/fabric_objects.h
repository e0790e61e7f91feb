/* Lists libfabric's providers, opens endpoints, registers memory and adds peers' addresses, for Python.
 *
 * Python loads the library; these functions are in C because they need the library's headers. A function of type int
 * returns 0 or libfabric's error number, unless its comment says otherwise. */
#pragma once

#include <stdint.h>

/* The addresses of libfabric's functions; each field has the name of its function. */
typedef struct ProxycclFabricLibrary {
  uintptr_t fi_getinfo, fi_freeinfo, fi_dupinfo, fi_fabric;
} ProxycclFabricLibrary;

/* A provider's description of an endpoint that the provider can make. The strings and `source` are valid as long as the
 * list of offers. */
typedef struct ProxycclFabricOffer {
  const char *provider, *domain;
  const void *source; /* the endpoint's own address, which has `source_bytes` bytes; NULL if not known yet */
  uint32_t source_bytes, address_format;
  uint32_t ordered;       /* 1 if writes reach the peer's memory in the order of their posts */
  uint32_t parts;         /* maximum number of memory ranges of one write, local and remote each */
  uint32_t reads;         /* 1 if the endpoint also supports reads */
  uint32_t remote;        /* 1 if the endpoint can reach other hosts */
  uint32_t device_memory; /* 1 if GPU memory can be registered, provided that the library supports the GPUs */
  uint32_t virtual_keys;  /* 1 if peers address registered memory by virtual addresses, 0 if by offsets */
  uint32_t provider_keys; /* 1 if the provider chooses the keys of memory, 0 if the caller chooses them */
  uint32_t key_bytes;
  uint32_t depth; /* maximum number of writes that may be outstanding */
  uint64_t max_message;
  uint64_t bits_per_second; /* the link's rate; 0 if not known */
} ProxycclFabricOffer;

/* Lists the endpoints that providers offer for writes to peers' memory. `ordered` requires that writes arrive in order,
 * `reads` that the endpoints also support reads, and `device_memory` that they also support GPU memory.
 * proxyccl_fabric_offers_free frees the list. */
typedef struct ProxycclFabricOffers ProxycclFabricOffers;
int proxyccl_fabric_offers(const ProxycclFabricLibrary *library, uint32_t ordered, uint32_t reads,
                           uint32_t device_memory, ProxycclFabricOffers **offers);
/* Stores offer `number`, counted from 0, in *offer. Returns 1, or 0 if no offer matches. */
int proxyccl_fabric_offer(const ProxycclFabricOffers *offers, uint32_t number, ProxycclFabricOffer *offer);
void proxyccl_fabric_offers_free(ProxycclFabricOffers *offers);

/* An enabled endpoint with its domain, completion queue and address vector. */
typedef struct ProxycclFabricEndpoint ProxycclFabricEndpoint;
typedef struct ProxycclFabricParts {
  uintptr_t endpoint, queue, fabric, peers; /* fid_ep *, fid_cq *, fid_fabric *, fid_av * */
  int32_t descriptor;                       /* a file descriptor that is readable when the queue has an entry; -1 if
                                               there is none */
} ProxycclFabricParts;

/* Opens an endpoint of offer `number`. `completions` is the completion queue's size. With `waits`, the queue gets a
 * file descriptor if the provider supports one. The endpoint belongs to the domain of `domain_of`, which must be closed
 * after it, or to a new domain if `domain_of` is NULL. `address` is the address that an earlier endpoint of the offer
 * had (proxyccl_fabric_address), or NULL for any. On failure, *call is the name of the libfabric function that
 * failed. */
int proxyccl_fabric_open(const ProxycclFabricLibrary *library, const ProxycclFabricOffers *offers, uint32_t number,
                         uint32_t completions, uint32_t waits, const ProxycclFabricEndpoint *domain_of,
                         const void *address, ProxycclFabricEndpoint **endpoint, const char **call);
void proxyccl_fabric_parts(const ProxycclFabricEndpoint *endpoint, ProxycclFabricParts *parts);
/* Closes an endpoint and frees it. The caller must first deregister all memory, and wait for all requests whose results
 * it needs. Returns the first error, or 0. */
int proxyccl_fabric_close(ProxycclFabricEndpoint *endpoint);

/* Stores the endpoint's address in a buffer. *bytes is the buffer's size before the call, and the address's length
 * after it. */
int proxyccl_fabric_address(const ProxycclFabricEndpoint *endpoint, void *address, uint64_t *bytes);
/* Adds a peer to the address vector, and stores the peer's fi_addr_t in *peer. */
int proxyccl_fabric_insert(ProxycclFabricEndpoint *endpoint, const char *address, uint64_t *peer);

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

/* Registers memory for this rank's own requests and for peers' writes, and for peers' reads if the endpoint supports
 * them. `key` is the memory's key if the provider lets the caller choose keys. `device` is the number of a CUDA
 * device. */
int proxyccl_fabric_register(ProxycclFabricEndpoint *endpoint, uintptr_t address, uint64_t bytes, uint64_t key,
                             ProxycclFabricOwner owner, int32_t device, ProxycclFabricRegion *region);
int proxyccl_fabric_deregister(uintptr_t region);
