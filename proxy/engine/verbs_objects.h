/* Finds libibverbs' structures in pyverbs' objects, which say nothing of them before version 61.
 *
 * All reads are made by the kernel on our behalf, so an address that leads nowhere is an answer and not a fault. */
#ifndef PROXYCCL_VERBS_OBJECTS_H
#define PROXYCCL_VERBS_OBJECTS_H

#include <stdint.h>

enum { PROXYCCL_VERBS_QP_OFFSET = 40 }; /* bytes from a pyverbs QP to its ibv_qp *, in versions 36 to 64 */

typedef enum ProxycclVerbsFinding {
  PROXYCCL_VERBS_FOUND = 0,
  PROXYCCL_VERBS_NO_OBJECT = 1,   /* the object's memory can't be read there */
  PROXYCCL_VERBS_NO_POINTER = 2,  /* what lies there leads to no memory */
  PROXYCCL_VERBS_OTHER_QP = 3,    /* what it leads to has another number */
  PROXYCCL_VERBS_OTHER_PARTS = 4, /* its domain or a completion queue is of another context, or none */
  PROXYCCL_VERBS_FORBIDDEN = 5,   /* the system lets a process not read itself: process_vm_readv fails */
  PROXYCCL_VERBS_NOT_BUILT = 6    /* libibverbs' headers were not there */
} ProxycclVerbsFinding;

typedef struct ProxycclVerbsQp {
  uintptr_t qp;      /* ibv_qp * */
  uintptr_t send_cq; /* ibv_cq * */
} ProxycclVerbsQp;

/* The queue pair of a pyverbs QP whose pointer lies `offset` bytes into it. `found` is set on PROXYCCL_VERBS_FOUND. */
ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num, ProxycclVerbsQp *found);
/* The same for the address of an ibv_qp itself. */
ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found);

#endif
