#include "fabric_objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<rdma/fi_rma.h>)

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

/* The oldest version of libfabric's interface that has every feature used in this file. Later libraries emulate this
 * version on request. */
#define INTERFACE FI_VERSION(1, 11)
#define READS (FI_READ | FI_REMOTE_READ)

typedef int Getinfo(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
typedef void Freeinfo(struct fi_info *);
typedef struct fi_info *Dupinfo(const struct fi_info *);
typedef int OpenFabric(struct fi_fabric_attr *, struct fid_fabric **, void *);

struct ProxycclFabricOffers {
  struct fi_info *first;
  Freeinfo *free_info;
};

struct ProxycclFabricEndpoint {
  int binds_regions; /* 1 if registered memory must also be bound to the endpoint */
  int reads;
  int shares; /* 1 if the fabric and the domain belong to another endpoint */
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_cq *queue;
  int descriptor; /* the queue's file descriptor; -1 if there is none */
  struct fid_av *peers;
  struct fid_ep *endpoint;
};

static int status_of(ssize_t status) { return status >= 0 ? 0 : (int)-status; }

int proxyccl_fabric_offers(const ProxycclFabricLibrary *library, uint32_t ordered, uint32_t reads,
                           uint32_t device_memory, ProxycclFabricOffers **offers) {
  Freeinfo *free_info = (Freeinfo *)library->fi_freeinfo;
  struct fi_info *hints = ((Dupinfo *)library->fi_dupinfo)(NULL);
  if (hints == NULL) return ENOMEM;
  hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE | (reads ? READS : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2; /* each request passes context memory, which a provider may need */
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE; /* several workers use the endpoint */
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (device_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  if (ordered) hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_WAW;
  struct fi_info *found = NULL;
  const int status = ((Getinfo *)library->fi_getinfo)(INTERFACE, NULL, NULL, 0, hints, &found);
  free_info(hints);
  if (status != 0) return status_of(status);
  *offers = malloc(sizeof **offers);
  if (*offers == NULL) {
    free_info(found);
    return ENOMEM;
  }
  **offers = (ProxycclFabricOffers){found, free_info};
  return 0;
}

static const struct fi_info *info_of(const ProxycclFabricOffers *offers, uint32_t number) {
  const struct fi_info *info = offers->first;
  for (; info != NULL && number > 0; --number) info = info->next;
  return info;
}

int proxyccl_fabric_offer(const ProxycclFabricOffers *offers, uint32_t number, ProxycclFabricOffer *offer) {
  const struct fi_info *info = info_of(offers, number);
  if (info == NULL) return 0;
  const uint64_t ordered_bytes = info->ep_attr->max_order_waw_size;
  const int ordered = (info->tx_attr->msg_order & FI_ORDER_WAW) != 0 && ordered_bytes >= sizeof(uint64_t);
  *offer = (ProxycclFabricOffer){
      .provider = info->fabric_attr->prov_name,
      .domain = info->domain_attr->name,
      .source = info->src_addr,
      .source_bytes = (uint32_t)info->src_addrlen,
      .address_format = info->addr_format,
      .ordered = (uint32_t)ordered,
      .parts = (uint32_t)(info->tx_attr->iov_limit < info->tx_attr->rma_iov_limit ? info->tx_attr->iov_limit
                                                                                  : info->tx_attr->rma_iov_limit),
      .reads = (info->caps & READS) == READS,
      .remote = (info->caps & (FI_LOCAL_COMM | FI_REMOTE_COMM)) != FI_LOCAL_COMM,
      .device_memory = (info->caps & FI_HMEM) != 0,
      .virtual_keys = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0,
      .provider_keys = (info->domain_attr->mr_mode & FI_MR_PROV_KEY) != 0,
      .key_bytes = (uint32_t)info->domain_attr->mr_key_size,
      .depth = (uint32_t)info->tx_attr->size,
      /* A provider may keep the order only for writes up to a certain length. */
      .max_message =
          ordered && ordered_bytes < info->ep_attr->max_msg_size ? ordered_bytes : info->ep_attr->max_msg_size,
      .bits_per_second = info->nic != NULL && info->nic->link_attr != NULL ? info->nic->link_attr->speed : 0,
  };
  return 1;
}

void proxyccl_fabric_offers_free(ProxycclFabricOffers *offers) {
  offers->free_info(offers->first);
  free(offers);
}

/* Opens the completion queue, with a file descriptor if `waits` is set and the provider supports one. */
static int open_queue(ProxycclFabricEndpoint *self, uint32_t completions, uint32_t waits) {
  struct fi_cq_attr queue = {.size = completions, .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_FD};
  self->descriptor = -1;
  if (waits && fi_cq_open(self->domain, &queue, &self->queue, NULL) == 0) {
    if (fi_control(&self->queue->fid, FI_GETWAIT, &self->descriptor) == 0) return 0;
    self->descriptor = -1;
    return 0;
  }
  queue.wait_obj = FI_WAIT_NONE;
  return fi_cq_open(self->domain, &queue, &self->queue, NULL);
}

static int open_parts(ProxycclFabricEndpoint *self, OpenFabric *open_fabric, struct fi_info *info, uint32_t completions,
                      uint32_t waits, const char **call) {
  struct fi_av_attr peers = {.type = info->domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE};
  int status;
  *call = "fi_fabric";
  if (!self->shares && (status = open_fabric(info->fabric_attr, &self->fabric, NULL)) != 0) return status;
  *call = "fi_domain";
  if (!self->shares && (status = fi_domain(self->fabric, info, &self->domain, NULL)) != 0) return status;
  *call = "fi_cq_open";
  if ((status = open_queue(self, completions, waits)) != 0) return status;
  *call = "fi_av_open";
  if ((status = fi_av_open(self->domain, &peers, &self->peers, NULL)) != 0) return status;
  *call = "fi_endpoint";
  if ((status = fi_endpoint(self->domain, info, &self->endpoint, NULL)) != 0) return status;
  *call = "fi_ep_bind";
  if ((status = fi_ep_bind(self->endpoint, &self->peers->fid, 0)) != 0) return status;
  if ((status = fi_ep_bind(self->endpoint, &self->queue->fid, FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION)) != 0)
    return status;
  *call = "fi_enable";
  return fi_enable(self->endpoint);
}

int proxyccl_fabric_open(const ProxycclFabricLibrary *library, const ProxycclFabricOffers *offers, uint32_t number,
                         uint32_t completions, uint32_t waits, const ProxycclFabricEndpoint *domain_of,
                         const void *address, ProxycclFabricEndpoint **endpoint, const char **call) {
  const struct fi_info *info = info_of(offers, number);
  ProxycclFabricEndpoint *self = calloc(1, sizeof *self);
  *call = "calloc";
  if (self == NULL || info == NULL) {
    free(self);
    return ENOMEM;
  }
  self->binds_regions = (info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0;
  self->reads = (info->caps & READS) == READS;
  if (domain_of != NULL) {
    self->shares = 1;
    self->fabric = domain_of->fabric;
    self->domain = domain_of->domain;
  }
  struct fi_info *own = ((Dupinfo *)library->fi_dupinfo)(info);
  if (own != NULL && address != NULL && own->src_addr != NULL) memcpy(own->src_addr, address, own->src_addrlen);
  const int status =
      own == NULL ? -ENOMEM : open_parts(self, (OpenFabric *)library->fi_fabric, own, completions, waits, call);
  if (own != NULL) ((Freeinfo *)library->fi_freeinfo)(own);
  if (status != 0) {
    proxyccl_fabric_close(self);
    return status_of(status);
  }
  *endpoint = self;
  return 0;
}

void proxyccl_fabric_parts(const ProxycclFabricEndpoint *endpoint, ProxycclFabricParts *parts) {
  *parts = (ProxycclFabricParts){(uintptr_t)endpoint->endpoint, (uintptr_t)endpoint->queue, (uintptr_t)endpoint->fabric,
                                 (uintptr_t)endpoint->peers, endpoint->descriptor};
}

int proxyccl_fabric_close(ProxycclFabricEndpoint *self) {
  struct fid *const parts[] = {
      self->endpoint == NULL ? NULL : &self->endpoint->fid,
      self->peers == NULL ? NULL : &self->peers->fid,
      self->queue == NULL ? NULL : &self->queue->fid,
      self->domain == NULL || self->shares ? NULL : &self->domain->fid,
      self->fabric == NULL || self->shares ? NULL : &self->fabric->fid,
  };
  int first = 0;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; ++i) {
    const int status = parts[i] == NULL ? 0 : fi_close(parts[i]);
    if (first == 0) first = status_of(status);
  }
  free(self);
  return first;
}

int proxyccl_fabric_address(const ProxycclFabricEndpoint *self, void *address, uint64_t *bytes) {
  size_t room = *bytes;
  const int status = fi_getname(&self->endpoint->fid, address, &room);
  *bytes = room;
  return status_of(status);
}

int proxyccl_fabric_insert(ProxycclFabricEndpoint *self, const char *address, uint64_t *peer) {
  fi_addr_t inserted = FI_ADDR_NOTAVAIL;
  const int status = fi_av_insert(self->peers, address, 1, &inserted, 0, NULL);
  *peer = inserted;
  return status == 1 ? 0 : status < 0 ? -status : FI_EINVAL;
}

int proxyccl_fabric_register(ProxycclFabricEndpoint *self, uintptr_t address, uint64_t bytes, uint64_t key,
                             ProxycclFabricOwner owner, int32_t device, ProxycclFabricRegion *region) {
  static const enum fi_hmem_iface interfaces[] = {[PROXYCCL_FABRIC_HOST] = FI_HMEM_SYSTEM,
                                                  [PROXYCCL_FABRIC_CUDA] = FI_HMEM_CUDA,
                                                  [PROXYCCL_FABRIC_ROCR] = FI_HMEM_ROCR};
  const struct iovec part = {(void *)address, bytes};
  const struct fi_mr_attr attributes = {
      .mr_iov = &part,
      .iov_count = 1,
      .access = FI_WRITE | FI_REMOTE_WRITE | (self->reads ? READS : 0),
      .requested_key = key,
      .iface = interfaces[owner],
      .device.cuda = owner == PROXYCCL_FABRIC_CUDA ? device : 0,
  };
  struct fid_mr *made = NULL;
  int status = fi_mr_regattr(self->domain, &attributes, 0, &made);
  if (status != 0) return status_of(status);
  if (self->binds_regions) {
    status = fi_mr_bind(made, &self->endpoint->fid, 0);
    if (status == 0) status = fi_mr_enable(made);
  }
  if (status == 0 && fi_mr_key(made) == FI_KEY_NOTAVAIL) status = -FI_EKEYREJECTED;
  if (status != 0) {
    fi_close(&made->fid);
    return status_of(status);
  }
  *region = (ProxycclFabricRegion){(uintptr_t)made, fi_mr_key(made), (uintptr_t)fi_mr_desc(made)};
  return 0;
}

int proxyccl_fabric_deregister(uintptr_t region) { return status_of(fi_close(&((struct fid_mr *)region)->fid)); }

#else

#pragma GCC diagnostic ignored "-Wunused-parameter"

int proxyccl_fabric_offers(const ProxycclFabricLibrary *library, uint32_t ordered, uint32_t reads,
                           uint32_t device_memory, ProxycclFabricOffers **offers) {
  return ENOSYS;
}

/* A build without libfabric has no offers, so nothing calls the functions below. */
int proxyccl_fabric_offer(const ProxycclFabricOffers *offers, uint32_t number, ProxycclFabricOffer *offer) { return 0; }

void proxyccl_fabric_offers_free(ProxycclFabricOffers *offers) {}

int proxyccl_fabric_open(const ProxycclFabricLibrary *library, const ProxycclFabricOffers *offers, uint32_t number,
                         uint32_t completions, uint32_t waits, const ProxycclFabricEndpoint *domain_of,
                         const void *address, ProxycclFabricEndpoint **endpoint, const char **call) {
  *call = "fi_fabric";
  return ENOSYS;
}

void proxyccl_fabric_parts(const ProxycclFabricEndpoint *endpoint, ProxycclFabricParts *parts) {}

int proxyccl_fabric_close(ProxycclFabricEndpoint *endpoint) { return 0; }

int proxyccl_fabric_address(const ProxycclFabricEndpoint *endpoint, void *address, uint64_t *bytes) { return ENOSYS; }

int proxyccl_fabric_insert(ProxycclFabricEndpoint *endpoint, const char *address, uint64_t *peer) { return ENOSYS; }

int proxyccl_fabric_register(ProxycclFabricEndpoint *endpoint, uintptr_t address, uint64_t bytes, uint64_t key,
                             ProxycclFabricOwner owner, int32_t device, ProxycclFabricRegion *region) {
  return ENOSYS;
}

int proxyccl_fabric_deregister(uintptr_t region) { return 0; }

#endif
