/* Finds the address of the libibverbs structure in a pyverbs object. pyverbs exports this address only from version 61
 * on.
 *
 * All memory is read through a system call, so an invalid address gives an error instead of a fault. */
#pragma once

#include <stdint.h>

enum { PROXYCCL_VERBS_QP_OFFSET = 40 }; /* offset of the ibv_qp * in a pyverbs QP, for versions 36 to 64 of pyverbs */

typedef enum ProxycclVerbsFinding {
  PROXYCCL_VERBS_FOUND = 0,
  PROXYCCL_VERBS_NO_OBJECT = 1,   /* the object's memory can't be read at the offset */
  PROXYCCL_VERBS_NO_POINTER = 2,  /* the value at the offset is not an address of readable memory */
  PROXYCCL_VERBS_OTHER_QP = 3,    /* the queue pair at this address has a number other than `qp_num` */
  PROXYCCL_VERBS_OTHER_PARTS = 4, /* the queue pair, its domain and its completion queues have different contexts */
  PROXYCCL_VERBS_FORBIDDEN = 5,   /* the process may not read its own memory by process_vm_readv */
  PROXYCCL_VERBS_NOT_BUILT = 6    /* built without libibverbs' headers */
} ProxycclVerbsFinding;

typedef struct ProxycclVerbsQp {
  uintptr_t qp;      /* ibv_qp * */
  uintptr_t send_cq; /* ibv_cq * */
} ProxycclVerbsQp;

/* Reads the ibv_qp * at `offset` in a pyverbs QP at address `object`, and checks that it is the queue pair with number
 * `qp_num`. Fills in *found only if the result is PROXYCCL_VERBS_FOUND. */
ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num, ProxycclVerbsQp *found);
/* Checks that the ibv_qp * `qp` is the queue pair with number `qp_num`. */
ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found);
