/* The forms that a group keeps, found by the signatures of calls.
 *
 * A signature holds everything on which a form depends: the options, the kinds of the arrays (arrays.h) and how they
 * overlap. A signature contains no addresses, unless its form is bound to addresses, which is rare. */
#ifndef PROXYCCL_KEPT_FORMS_H
#define PROXYCCL_KEPT_FORMS_H

#include "form.h"

enum { PROXYCCL_FORM_CHAINS = 512, PROXYCCL_MOST_FORMS = 2048, PROXYCCL_MOST_ARRAYS = 8 };

/* How two arrays of a call overlap: not at all, with a common beginning, with the smaller array as this rank's share of
 * the larger, or in a way that no call allows. */
typedef enum { APART, TOGETHER, SHARE, OVERLAPPING } Relation;
enum { PROXYCCL_RELATION_BITS = 2 };

typedef struct Signature {
  PyObject* options; /* a tuple */
  size_t count;      /* number of arrays */
  const GivenArray* arrays;
  uint64_t relations; /* the Relation of each pair of arrays, in PROXYCCL_RELATION_BITS bits */
  uint64_t hash;
} Signature;

typedef struct KeptForms {
  struct Entry* chains[PROXYCCL_FORM_CHAINS];
  struct Entry *oldest, *newest; /* the first and the last entry in the order of last use */
  Py_ssize_t count;
} KeptForms;

/* Computes the member `relations` of a signature for this rank. Returns 1 if two arrays are OVERLAPPING, else 0. */
int proxyccl_relate(Signature* signature, size_t rank);
/* Computes the member `hash` of a signature from the other members. */
void proxyccl_hash_signature(Signature* signature);
/* Returns the form for a hashed signature as a new reference; NULL if no form is kept. */
CallForm* proxyccl_find_form(KeptForms* forms, const Signature* signature);
/* Keeps a form. If its launch holds proxies' ids of memory, the form is found only for arrays at the same addresses. If
 * too many forms are kept, drops the least recently used form. Returns 0, or -1 with an exception. */
int proxyccl_keep_form(KeptForms* forms, const Signature* signature, CallForm* form);
/* Drops the forms that are bound to memory in a range. */
void proxyccl_drop_forms_of(KeptForms* forms, uintptr_t start, uintptr_t end);
void proxyccl_drop_all_forms(KeptForms* forms);
int proxyccl_visit_forms(const KeptForms* forms, visitproc visit, void* arg);

#endif
