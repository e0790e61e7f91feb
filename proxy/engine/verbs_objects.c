/* An ibv_qp * is accepted if the struct at this address has the expected queue pair number, and if the queue pair, its
 * protection domain and its completion queues have the same context. */
#define _GNU_SOURCE
#include "verbs_objects.h"

#if __has_include(<infiniband/verbs.h>)

#include <errno.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <sys/uio.h>
#include <unistd.h>

/* Copies memory of this process by a system call. Returns 0 or an errno. */
static int copy_from(const void *address, void *out, size_t bytes) {
  const struct iovec local = {out, bytes}, remote = {(void *)address, bytes};
  const ssize_t copied = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  if (copied < 0) return errno;
  return (size_t)copied == bytes ? 0 : EFAULT; /* a shorter copy means that some of the memory is unreadable */
}

static ProxycclVerbsFinding finding(int error, ProxycclVerbsFinding unreadable) {
  if (error == 0) return PROXYCCL_VERBS_FOUND;
  return error == EFAULT ? unreadable : PROXYCCL_VERBS_FORBIDDEN;
}

/* Checks that a domain or completion queue belongs to the expected context. libibverbs' structures begin with a pointer
 * to their context. */
static ProxycclVerbsFinding of_context(const void *part, const struct ibv_context *expected) {
  struct ibv_context *context;
  const ProxycclVerbsFinding result = finding(copy_from(part, &context, sizeof context), PROXYCCL_VERBS_OTHER_PARTS);
  if (result != PROXYCCL_VERBS_FOUND) return result;
  return context == expected ? PROXYCCL_VERBS_FOUND : PROXYCCL_VERBS_OTHER_PARTS;
}

ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found) {
  struct ibv_qp copy;
  ProxycclVerbsFinding result =
      finding(copy_from((const void *)qp, &copy, offsetof(struct ibv_qp, mutex)), PROXYCCL_VERBS_NO_POINTER);
  if (result != PROXYCCL_VERBS_FOUND) return result;
  if (copy.qp_num != qp_num) return PROXYCCL_VERBS_OTHER_QP;
  _Static_assert(offsetof(struct ibv_pd, context) == 0 && offsetof(struct ibv_cq, context) == 0, "of_context");
  const void *parts[] = {copy.pd, copy.send_cq, copy.recv_cq};
  for (uint32_t i = 0; i < sizeof parts / sizeof *parts; ++i)
    if ((result = of_context(parts[i], copy.context)) != PROXYCCL_VERBS_FOUND) return result;
  *found = (ProxycclVerbsQp){qp, (uintptr_t)copy.send_cq};
  return PROXYCCL_VERBS_FOUND;
}

ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num,
                                            ProxycclVerbsQp *found) {
  uintptr_t qp;
  const ProxycclVerbsFinding result =
      finding(copy_from((const void *)(object + offset), &qp, sizeof qp), PROXYCCL_VERBS_NO_OBJECT);
  return result == PROXYCCL_VERBS_FOUND ? proxyccl_verbs_check_qp(qp, qp_num, found) : result;
}

#else

ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found) {
  (void)qp, (void)qp_num, (void)found;
  return PROXYCCL_VERBS_NOT_BUILT;
}

ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num,
                                            ProxycclVerbsQp *found) {
  (void)object, (void)offset, (void)qp_num, (void)found;
  return PROXYCCL_VERBS_NOT_BUILT;
}

#endif
