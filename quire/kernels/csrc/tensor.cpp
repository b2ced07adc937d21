#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "tensor.h"

#include "convert.h"

namespace {

// Declarations of DLPack 1.3, https://dmlc.github.io/dlpack/latest/c_api.html, as far as they are needed.
struct DLTensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct DLPackExchangeAPI {
    uint32_t major, minor;
    const DLPackExchangeAPI *previous;
    void *allocate, *from_object, *to_object;
    int (*tensor_from_object)(void *object, DLTensor *out);  // borrows, takes no reference
    void *current_stream;
};
constexpr int32_t DEVICE_CPU = 1;
enum TypeCode : uint8_t { INT = 0, UINT = 1, FLOAT = 2, BFLOAT = 4 };

PyTypeObject *tensor_type;  // torch.Tensor
const DLPackExchangeAPI *exchange;

DType dtype_of(const DLTensor &x) {
    if (x.type_code == FLOAT && x.type_bits == 32) return DType::FLOAT32;
    if (x.type_code == FLOAT && x.type_bits == 64) return DType::FLOAT64;
    if (x.type_code == BFLOAT) return DType::BFLOAT16;
    if (x.type_code == INT && x.type_bits == 8) return DType::INT8;
    if (x.type_code == INT && x.type_bits == 32) return DType::INT32;
    if (x.type_code == INT && x.type_bits == 64) return DType::INT64;
    return DType::OTHER;
}

const char *text_of(DType dtype) {
    switch (dtype) {
        case DType::FLOAT32: return "float32";
        case DType::FLOAT64: return "float64";
        case DType::BFLOAT16: return "bfloat16";
        case DType::INT8: return "int8";
        case DType::INT32: return "int32";
        case DType::INT64: return "int64";
        default: return "another dtype";
    }
}

}  // namespace

bool find_tensor_type() {
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *type = torch ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
    PyObject *capsule = type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : nullptr;
    tensor_type = reinterpret_cast<PyTypeObject *>(type);  // kept for good
    if (capsule) exchange = static_cast<DLPackExchangeAPI *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_XDECREF(capsule);
    Py_XDECREF(torch);
    if (exchange && exchange->major == 1 && exchange->tensor_from_object) return true;
    PyErr_SetString(PyExc_ImportError, "this version of torch has no DLPack exchange API 1.x for tensors");
    return false;
}

bool is_supported(PyObject *object, DType &dtype) {
    DLTensor x;
    if (!PyObject_TypeCheck(object, tensor_type)) return false;
    if (exchange->tensor_from_object(object, &x)) {
        PyErr_Clear();  // on a device without addresses, or sparse
        return false;
    }
    dtype = dtype_of(x);
    return x.device_type == DEVICE_CPU && x.ndim > 0 && x.strides[x.ndim - 1] == 1;
}

Tensor Convert<Tensor>::from_python(PyObject *object, const char *name) {
    DLTensor x;
    if (!PyObject_TypeCheck(object, tensor_type))
        throw TypeError(std::string(name) + ": a torch.Tensor is expected, not " + Py_TYPE(object)->tp_name);
    bool failed = exchange->tensor_from_object(object, &x);
    if (failed) PyErr_Clear();
    if (failed || x.device_type != DEVICE_CPU) throw ValueError(std::string(name) + ": a tensor in CPU memory is expected");
    void *data = static_cast<char *>(x.data) + x.byte_offset;
    return {name, dtype_of(x), x.type_bits / 8, x.ndim, x.shape, x.strides, object, data};
}

std::string Size::text() const {
    return value_ < 0 ? std::string(name_) : std::string(name_) + "=" + std::to_string(value_);
}

std::string Tensor::shape_text() const {
    std::string text = "(";
    for (int i = 0; i < dim; i++) text += std::to_string(shape[i]) + (i + 1 < dim ? ", " : dim == 1 ? ",)" : ")");
    return dim ? text : "()";
}

const Tensor &Tensor::has_shape_of(const Tensor &other) const {
    bool same = dim == other.dim;
    for (int i = 0; same && i < dim; i++) same = shape[i] == other.shape[i];
    if (same) return *this;
    throw ValueError(std::string(name) + ": shape " + other.shape_text() + " as " + other.name + " is expected, not " +
                     shape_text());
}

void Tensor::fail_dtype(std::initializer_list<DType> accepted) const {
    std::string expected;
    for (DType one : accepted) expected += (expected.empty() ? "" : " or ") + std::string(text_of(one));
    throw TypeError(std::string(name) + ": dtype " + expected + " is expected, not " + text_of(dtype));
}

void Tensor::fail_shape(std::initializer_list<const Size *> sizes) const {
    std::string expected;
    for (const Size *size : sizes) expected += (expected.empty() ? "" : ", ") + size->text();
    throw ValueError(std::string(name) + ": shape (" + expected + ") is expected, not " + shape_text());
}

void Tensor::fail_stride(int dims) const {
    std::string where = dims == 1 ? " in its last dimension" : " in its last " + std::to_string(dims) + " dimensions";
    throw ValueError(std::string(name) + ": has to be contiguous" + (dims == dim ? "" : where));
}

void fail_value(const char *argument, const char *message) { throw ValueError(std::string(argument) + ": " + message); }
