#include "kept_forms.h"

#include <string.h>

typedef struct KeptArray {
  ArrayKind kind;
  uintptr_t at;
} KeptArray;

/* A kept form, linked in the chain of its hash and in the order of use. */
typedef struct Entry {
  struct Entry *next, *older, *newer;
  uint64_t hash;
  PyObject* options;
  uint64_t relations;
  int by_address; /* 1: the form may be used only for arrays at the same addresses */
  CallForm* form; /* NULL: forms with this signature are in entries with `by_address` */
  size_t count;
  KeptArray arrays[];
} Entry;

static Relation relation_of(const GivenArray* x, const GivenArray* out, size_t rank) {
  const GivenArray* part = out->bytes < x->bytes ? out : x;
  const GivenArray* whole = part == out ? x : out;
  const size_t share = part->bytes < whole->bytes ? rank * part->bytes : 0;
  if (part->at == whole->at + share) return share == 0 ? TOGETHER : SHARE;
  return part->at < whole->at + whole->bytes && whole->at < part->at + part->bytes ? OVERLAPPING : APART;
}

int proxyccl_relate(Signature* signature, size_t rank) {
  int overlap = 0;
  for (size_t i = 0; i < signature->count; ++i)
    for (size_t k = i + 1; k < signature->count; ++k) {
      const Relation relation = relation_of(&signature->arrays[i], &signature->arrays[k], rank);
      signature->relations = signature->relations << PROXYCCL_RELATION_BITS | relation;
      overlap |= relation == OVERLAPPING;
    }
  return overlap;
}

/* Returns whether an option is compared by value. A bool is compared by identity, so True and 1 differ. */
static int has_value(PyObject* option) {
  return PyUnicode_CheckExact(option) || PyLong_CheckExact(option) || PyFloat_CheckExact(option) ||
         PyTuple_CheckExact(option);
}

/* Returns whether options of two calls are equal: the same object, or equal values of one type. */
static int same_option(PyObject* a, PyObject* b) {
  if (a == b) return 1;
  if (Py_TYPE(a) != Py_TYPE(b) || !has_value(a)) return 0;
  const int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same > 0;
}

static uint64_t hash_of_option(PyObject* option) {
  const Py_hash_t hash = has_value(option) ? PyObject_Hash(option) : -1;
  if (hash != -1) return (uint64_t)hash;
  PyErr_Clear(); /* an exception is set for a tuple with an unhashable item */
  return (uintptr_t)option;
}

static uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

void proxyccl_hash_signature(Signature* signature) {
  uint64_t hash = signature->relations;
  for (Py_ssize_t i = 0; i < PyTuple_Size(signature->options); ++i)
    hash = mix(hash, hash_of_option(PyTuple_GetItem(signature->options, i)));
  for (size_t i = 0; i < signature->count; ++i) {
    const ArrayKind* kind = &signature->arrays[i].kind;
    uint64_t format;
    memcpy(&format, kind->format, sizeof format);
    hash = mix(hash, ((uintptr_t)kind->type ^ (uintptr_t)kind->element << 1 ^ kind->reach) + format);
    for (Py_ssize_t k = 0; k < kind->dimensions; ++k) hash = mix(hash, (uint64_t)kind->shape[k]);
  }
  signature->hash = hash;
}

static uint64_t hash_with_addresses(const Signature* signature) {
  uint64_t hash = signature->hash;
  for (size_t i = 0; i < signature->count; ++i) hash = mix(hash, signature->arrays[i].at);
  return hash;
}

static int is_of(const Entry* entry, const Signature* signature, int by_address) {
  if (entry->by_address != by_address || entry->count != signature->count || entry->relations != signature->relations)
    return 0;
  for (size_t i = 0; i < entry->count; ++i) {
    const GivenArray* array = &signature->arrays[i];
    if (memcmp(&entry->arrays[i].kind, &array->kind, sizeof(ArrayKind)) != 0) return 0;
    if (by_address && entry->arrays[i].at != array->at) return 0;
  }
  const Py_ssize_t options = PyTuple_Size(signature->options);
  if (PyTuple_Size(entry->options) != options) return 0;
  for (Py_ssize_t i = 0; i < options; ++i)
    if (!same_option(PyTuple_GetItem(entry->options, i), PyTuple_GetItem(signature->options, i))) return 0;
  return 1;
}

/* -- entries --- */

static Entry** chain_of(const KeptForms* self, uint64_t hash) { return &self->chains[hash % PROXYCCL_FORM_CHAINS]; }

static Entry* find_entry(const KeptForms* self, const Signature* signature, uint64_t hash, int by_address) {
  Entry* entry = *chain_of(self, hash);
  while (entry != NULL && !(entry->hash == hash && is_of(entry, signature, by_address))) entry = entry->next;
  return entry;
}

static void leave_order(KeptForms* self, Entry* entry) {
  *(entry->older != NULL ? &entry->older->newer : &self->oldest) = entry->newer;
  *(entry->newer != NULL ? &entry->newer->older : &self->newest) = entry->older;
}

static void become_newest(KeptForms* self, Entry* entry) {
  entry->older = self->newest, entry->newer = NULL;
  *(self->newest != NULL ? &self->newest->newer : &self->oldest) = entry;
  self->newest = entry;
}

static void use(KeptForms* self, Entry* entry) {
  if (entry == self->newest) return;
  leave_order(self, entry);
  become_newest(self, entry);
}

CallForm* proxyccl_find_form(KeptForms* self, const Signature* signature) {
  Entry* entry = find_entry(self, signature, signature->hash, 0);
  if (entry != NULL && entry->form == NULL) {
    use(self, entry);
    entry = find_entry(self, signature, hash_with_addresses(signature), 1);
  }
  if (entry == NULL) return NULL;
  use(self, entry);
  return (CallForm*)Py_NewRef((PyObject*)entry->form);
}

/* Unlinks an entry before freeing it, because releasing an object may run Python code that uses the list. */
static void drop(KeptForms* self, Entry* entry) {
  Entry** at = chain_of(self, entry->hash);
  while (*at != entry) at = &(*at)->next;
  *at = entry->next;
  leave_order(self, entry);
  self->count -= 1;
  Py_DECREF(entry->options);
  for (size_t i = 0; i < entry->count; ++i) proxyccl_drop_kind(&entry->arrays[i].kind);
  Py_XDECREF((PyObject*)entry->form);
  PyMem_Free(entry);
}

/* Adds an entry, which takes its own references. Returns 0, or -1 with an exception. */
static int add(KeptForms* self, const Signature* signature, CallForm* form, int by_address) {
  Entry* entry = PyMem_Calloc(1, sizeof *entry + signature->count * sizeof *entry->arrays);
  if (entry == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  entry->hash = by_address ? hash_with_addresses(signature) : signature->hash;
  entry->options = Py_NewRef(signature->options);
  entry->count = signature->count, entry->relations = signature->relations, entry->by_address = by_address;
  for (size_t i = 0; i < signature->count; ++i) {
    const GivenArray* array = &signature->arrays[i];
    entry->arrays[i] = (KeptArray){array->kind, array->at};
    proxyccl_keep_kind(&array->kind);
  }
  entry->form = (CallForm*)Py_XNewRef((PyObject*)form);
  Entry* before = find_entry(self, signature, entry->hash, by_address);
  Entry** chain = chain_of(self, entry->hash);
  entry->next = *chain;
  *chain = entry;
  become_newest(self, entry);
  self->count += 1;
  if (before != NULL)
    drop(self, before);
  else if (self->count > PROXYCCL_MOST_FORMS)
    drop(self, self->oldest);
  return 0;
}

int proxyccl_keep_form(KeptForms* self, const Signature* signature, CallForm* form) {
  int bound = 0;
  for (size_t i = 0; form->names_memory && i < signature->count; ++i)
    bound |= signature->arrays[i].kind.reach & PROXYCCL_NAMED_BY_PROXIES;
  if (!bound) return add(self, signature, form, 0);
  return add(self, signature, NULL, 0) != 0 ? -1 : add(self, signature, form, 1);
}

void proxyccl_drop_all_forms(KeptForms* self) {
  while (self->oldest != NULL) drop(self, self->oldest);
}

static int touches(const Entry* entry, uintptr_t start, uintptr_t end) {
  for (size_t i = 0; entry->by_address && i < entry->count; ++i)
    if (start <= entry->arrays[i].at && entry->arrays[i].at < end) return 1;
  for (size_t i = 0; entry->form != NULL && i < entry->form->range_count; ++i)
    if (entry->form->ranges[i].start < end && start < entry->form->ranges[i].end) return 1;
  return 0;
}

void proxyccl_drop_forms_of(KeptForms* self, uintptr_t start, uintptr_t end) {
  for (int dropped = 1; dropped;) { /* restarts, because dropping a form may run Python code that changes the list */
    dropped = 0;
    for (Entry* entry = self->oldest; entry != NULL && !dropped; entry = entry->newer)
      if (touches(entry, start, end)) drop(self, entry), dropped = 1;
  }
}

int proxyccl_visit_forms(const KeptForms* self, visitproc visit, void* arg) {
  for (const Entry* entry = self->oldest; entry != NULL; entry = entry->newer) {
    Py_VISIT(entry->options);
    for (size_t i = 0; i < entry->count; ++i) {
      PROXYCCL_VISIT_KIND(entry->arrays[i].kind)
    }
    Py_VISIT((PyObject*)entry->form);
  }
  return 0;
}
