/* Wraps the real libfabric so that its TCP provider claims to support GPU memory (FI_HMEM). GPU memory, which is
 * host memory in these tests (support/hip), is registered as host memory. Each registration of GPU memory is printed
 * to stderr. */
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <stdio.h>
#include <stdlib.h>

static void *real(const char *name) {
  static void *library;
  if (library == NULL) library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_GLOBAL);
  void *found = library == NULL ? NULL : dlsym(library, name);
  if (found == NULL) abort();
  return found;
}

/* Removes FI_HMEM, which the real provider does not support, from `info`. */
static void strip(struct fi_info *info) {
  info->caps &= ~FI_HMEM;
  info->domain_attr->mr_mode &= ~FI_MR_HMEM;
}

uint32_t fi_version(void) { return ((uint32_t (*)(void))real("fi_version"))(); }
const char *fi_strerror(int error) { return ((const char *(*)(int))real("fi_strerror"))(error); }
void fi_freeinfo(struct fi_info *info) { ((void (*)(struct fi_info *))real("fi_freeinfo"))(info); }
struct fi_info *fi_dupinfo(const struct fi_info *info) {
  return ((struct fi_info * (*)(const struct fi_info *)) real("fi_dupinfo"))(info);
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **found) {
  int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **) = (int (*)(
      uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **))real("fi_getinfo");
  struct fi_info *asked = fi_dupinfo(hints);
  const int status = (strip(asked), getinfo(version, node, service, flags, asked, found));
  if (status == 0 && (hints->caps & FI_HMEM)) {
    for (struct fi_info *info = *found; info != NULL; info = info->next) {
      info->caps |= FI_HMEM;
      info->domain_attr->mr_mode |= FI_MR_HMEM;
    }
  }
  fi_freeinfo(asked);
  return status;
}

/* Function tables of the rank's only fabric and only domain, each with one function replaced. */
static struct fi_ops_fabric fabric_calls;
static struct fi_ops_mr memory_calls;
static int (*open_domain)(struct fid_fabric *, struct fi_info *, struct fid_domain **, void *);
static int (*register_memory)(struct fid *, const struct fi_mr_attr *, uint64_t, struct fid_mr **);

static int regattr(struct fid *domain, const struct fi_mr_attr *given, uint64_t flags, struct fid_mr **made) {
  struct fi_mr_attr attributes = *given;
  if (given->iface != FI_HMEM_SYSTEM) {
    fprintf(stderr, "registered for interface %d, device %d\n", (int)given->iface, given->device.cuda);
    attributes.iface = FI_HMEM_SYSTEM;
  }
  return register_memory(domain, &attributes, flags, made);
}

static int domain_of(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context) {
  strip(info);
  const int status = open_domain(fabric, info, domain, context);
  if (status == 0) {
    memory_calls = *(*domain)->mr;
    register_memory = memory_calls.regattr;
    memory_calls.regattr = regattr;
    (*domain)->mr = &memory_calls;
  }
  return status;
}

int fi_fabric(struct fi_fabric_attr *attributes, struct fid_fabric **fabric, void *context) {
  const int status =
      ((int (*)(struct fi_fabric_attr *, struct fid_fabric **, void *))real("fi_fabric"))(attributes, fabric, context);
  if (status == 0) {
    fabric_calls = *(*fabric)->ops;
    open_domain = fabric_calls.domain;
    fabric_calls.domain = domain_of;
    (*fabric)->ops = &fabric_calls;
  }
  return status;
}
