/* Finds libibverbs' structures inside pyverbs' objects, because pyverbs exports them only from version 61 on.
 *
 * The kernel does all reads, so an invalid address gives an error instead of a fault. */
#ifndef PROXYCCL_VERBS_OBJECTS_H
#define PROXYCCL_VERBS_OBJECTS_H

#include <stdint.h>

enum { PROXYCCL_VERBS_QP_OFFSET = 40 }; /* bytes from a pyverbs QP to its ibv_qp *, in versions 36 to 64 */

typedef enum ProxycclVerbsFinding {
  PROXYCCL_VERBS_FOUND = 0,
  PROXYCCL_VERBS_NO_OBJECT = 1,   /* the object's memory can't be read at the offset */
  PROXYCCL_VERBS_NO_POINTER = 2,  /* the value there is not an address of readable memory */
  PROXYCCL_VERBS_OTHER_QP = 3,    /* the queue pair at that address has another number */
  PROXYCCL_VERBS_OTHER_PARTS = 4, /* its domain or a completion queue has another context, or none */
  PROXYCCL_VERBS_FORBIDDEN = 5,   /* the process may not read its own memory by process_vm_readv */
  PROXYCCL_VERBS_NOT_BUILT = 6    /* built without libibverbs' headers */
} ProxycclVerbsFinding;

typedef struct ProxycclVerbsQp {
  uintptr_t qp;      /* ibv_qp * */
  uintptr_t send_cq; /* ibv_cq * */
} ProxycclVerbsQp;

/* Finds the queue pair in a pyverbs QP with the pointer at `offset`. Sets `found` on PROXYCCL_VERBS_FOUND. */
ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num, ProxycclVerbsQp *found);
/* Checks the ibv_qp at an address in the same way. */
ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found);

#endif
