#include "arrays.h"

#include <stddef.h>
#include <string.h>

#define NAMES_OF(name)                                                                                                \
  name(is_neg) name(is_conj) name(untyped_storage) name(nbytes) name(data_ptr) name(shape) name(dtype) name(itemsize) \
      name(ptr) name(_runtime) name(writable) name(address) name(device)
#define NUMBER(name) NAME_##name,
#define TEXT(name) #name,
enum { NAMES_OF(NUMBER) NAMES };
static const char* const kNames[NAMES] = {NAMES_OF(TEXT)};
static PyObject* names[NAMES]; /* a static variable, because a process loads the module only once */

int proxyccl_name_array_attributes(void) {
  for (int i = 0; i < NAMES; ++i)
    if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(kNames[i])) == NULL) return -1;
  return 0;
}

int proxyccl_as_array_types(PyObject* given, void* types) {
  ArrayTypes* self = types;
  return PyArg_ParseTuple(given, "O!O!O!O!n", &PyType_Type, &self->array, &PyType_Type, &self->view, &PyDict_Type,
                          &self->tensors, &PyTuple_Type, &self->place, &self->device);
}

static PyObject* call(PyObject* x, int name) { return PyObject_CallMethodObjArgs(x, names[name], NULL); }

/* Converts a Python number to a C number and releases the Python number. Returns -1 with an exception if `found` is
 * NULL. */
static Py_ssize_t number(PyObject* found) {
  const Py_ssize_t value = found == NULL ? -1 : PyLong_AsSsize_t(found);
  Py_XDECREF(found);
  return value;
}

/* Releases `found`, and returns whether it was `expected`, which is True or False. */
static int is(PyObject* found, PyObject* expected) {
  Py_XDECREF(found); /* True and False are never freed */
  return found == expected;
}

/* Reads a tensor's dtype and shape, and computes its size. Returns 1; or 0, possibly with an exception, if C can't read
 * the dtype or the shape (a symbolic shape, for example). */
static int read_elements(PyObject* x, GivenArray* array) {
  ArrayKind* kind = &array->kind;
  PyObject* shape = PyObject_GetAttr(x, names[NAME_shape]);
  const Py_ssize_t dimensions = shape != NULL && PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
  int read = 0 <= dimensions && dimensions <= PROXYCCL_MOST_DIMENSIONS;
  size_t count = 1;
  for (Py_ssize_t i = 0; read && i < dimensions; ++i) {
    kind->shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
    read = kind->shape[i] >= 0;
    count *= (size_t)kind->shape[i];
  }
  Py_XDECREF(shape);
  kind->dimensions = dimensions;
  if (!read || (kind->element = PyObject_GetAttr(x, names[NAME_dtype])) == NULL) return 0;
  const Py_ssize_t itemsize = number(PyObject_GetAttr(kind->element, names[NAME_itemsize]));
  array->bytes = count * (size_t)itemsize;
  return itemsize > 0;
}

/* Returns whether a tensor's storage holds all the tensor's elements: the program may have shrunk or freed it. */
static int has_memory(PyObject* x, const GivenArray* array) {
  PyObject* storage = call(x, NAME_untyped_storage);
  const Py_ssize_t held = storage == NULL ? -1 : number(call(storage, NAME_nbytes));
  const uintptr_t first = held <= 0 ? 0 : proxyccl_take_address(call(storage, NAME_data_ptr));
  Py_XDECREF(storage);
  return first != 0 && first <= array->at && array->at + array->bytes <= first + (size_t)held;
}

/* The C interface of DLPack 1.3 (github.com/dmlc/dlpack, dlpack.h), which torch supports since 2.10. */
typedef struct DlTensor {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides; /* strides in elements; NULL if elements are in C order */
  uint64_t offset;
} DlTensor;
typedef struct DlExchange {
  uint32_t major, minor;
  const struct DlExchange* older;
  void (*allocate)(void), (*export)(void), (*import)(void);
  int (*describe)(void* object, DlTensor* tensor);
} DlExchange;
enum { DL_CPU = 1, DL_CUDA = 2, DL_ROCM = 10 };
enum { DL_UNSIGNED = 1, DL_COMPLEX = 5 }; /* signed integers have code 0 */

static int is_contiguous(const DlTensor* tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor->dimensions; tensor->strides != NULL && i-- > 0;) {
    if (tensor->shape[i] != 1 && tensor->strides[i] != stride) return 0;
    stride *= tensor->shape[i];
  }
  return 1;
}

static int read_tensor(const ArrayTypes* types, PyObject* x, PyObject* exchange, GivenArray* array) {
  const DlExchange* functions = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  ArrayKind* const kind = &array->kind;
  DlTensor tensor;
  if (functions == NULL || functions->major != 1 || functions->describe == NULL) return 0;
  if (functions->describe(x, &tensor) != 0) return 0;
  const int on_gpu = tensor.device_type == DL_CUDA || tensor.device_type == DL_ROCM;
  if (types->device < 0 ? tensor.device_type != DL_CPU : !on_gpu || tensor.device != types->device) return 0;
  if (tensor.dimensions > PROXYCCL_MOST_DIMENSIONS) return 0;
  size_t count = 1;
  for (int32_t i = 0; i < tensor.dimensions; ++i) count *= (size_t)(kind->shape[i] = (Py_ssize_t)tensor.shape[i]);
  kind->dimensions = tensor.dimensions;
  memcpy(kind->format, &tensor.code, offsetof(DlTensor, shape) - offsetof(DlTensor, code));
  array->at = (uintptr_t)tensor.data + tensor.offset, array->bytes = count * tensor.lanes * tensor.bits / 8;
  if (count != 0 && !is_contiguous(&tensor)) return 0;
  /* DLPack describes torch's integers of less than 8 bits as 8-bit integers, so the dtype must tell these types
   * apart. */
  if (tensor.code <= DL_UNSIGNED && tensor.bits == 8 &&
      (kind->element = PyObject_GetAttr(x, names[NAME_dtype])) == NULL)
    return 0;
  if (!is(call(x, NAME_is_neg), Py_False) || (tensor.code == DL_COMPLEX && !is(call(x, NAME_is_conj), Py_False)))
    return 0;
  return array->bytes == 0 || has_memory(x, array);
}

static int lies_here(const ArrayTypes* types, PyObject* view) {
  PyObject* device = PyObject_GetAttr(view, names[NAME_device]);
  const int same = device != NULL && PyObject_RichCompareBool(device, types->place, Py_EQ) > 0;
  Py_XDECREF(device);
  return same;
}

static int read_of_array(const ArrayTypes* types, PyObject* x, GivenArray* array) {
  PyObject* known = array->kind.type == types->array ? PyObject_GetAttr(x, names[NAME_address]) : NULL;
  if (known == Py_None) Py_CLEAR(known);
  if (PyErr_Occurred() != NULL) return 0;
  array->at = proxyccl_take_address(
      known != NULL ? known : PyObject_GetAttr(x, names[NAME_ptr])); /* raises if the array was freed */
  if (PyErr_Occurred() != NULL || !read_elements(x, array)) return 0;
  if (array->kind.type == types->array)
    return (array->kind.runtime = PyObject_GetAttr(x, names[NAME__runtime])) != NULL;
  array->kind.readonly = !is(PyObject_GetAttr(x, names[NAME_writable]), Py_True);
  return PyErr_Occurred() == NULL && lies_here(types, x);
}

static int read_buffer(PyObject* x, GivenArray* array) {
  Py_buffer* const buffer = &array->buffer;
  ArrayKind* const kind = &array->kind;
  if (!PyObject_CheckBuffer(x)) return 0;
  if (PyObject_GetBuffer(x, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    buffer->obj = NULL; /* the array is not contiguous, or buffers do not support its type */
    return 0;
  }
  const size_t format = buffer->format == NULL ? PROXYCCL_LONGEST_FORMAT : strlen(buffer->format);
  if (buffer->ndim > PROXYCCL_MOST_DIMENSIONS || format >= PROXYCCL_LONGEST_FORMAT) return 0;
  kind->dimensions = buffer->ndim, kind->readonly = buffer->readonly != 0;
  if (buffer->ndim > 0) memcpy(kind->shape, buffer->shape, (size_t)buffer->ndim * sizeof *buffer->shape);
  memcpy(kind->format, buffer->format, format);
  array->at = (uintptr_t)buffer->buf, array->bytes = (size_t)buffer->len;
  return 1;
}

int proxyccl_read_array(const ArrayTypes* types, PyObject* x, GivenArray* array) {
  memset(&array->kind, 0, sizeof array->kind);
  array->buffer.obj = NULL;
  PyTypeObject* const type = Py_TYPE(x);
  array->kind.type = type;
  PyObject* exchange;
  int read;
  if (type == types->array || type == types->view)
    read = read_of_array(types, x, array);
  else if ((exchange = PyDict_GetItemWithError(types->tensors, (PyObject*)type)) != NULL)
    read = read_tensor(types, x, exchange, array);
  else
    read = PyErr_Occurred() == NULL && read_buffer(x, array); /* the lookup fails for a type without a hash */
  array->kind.alignment = array->at % 16;
  if (read) return 1;
  proxyccl_release_array(array);
  return proxyccl_clear_exception();
}

void proxyccl_release_array(GivenArray* array) {
  Py_CLEAR(array->kind.element);
  Py_CLEAR(array->kind.runtime);
  PyBuffer_Release(&array->buffer);
}
