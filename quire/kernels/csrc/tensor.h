// Tensors as arguments of ops: what a kernel needs to know of a torch.Tensor, and the checks of types, shapes and strides.
#pragma once

#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

struct TypeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct ValueError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class DType : uint8_t { FLOAT32, FLOAT64, BFLOAT16, INT8, INT32, INT64, OTHER };

// A size that several tensors have in common. The first shape that is compared with it sets it.
class Size {
  public:
    explicit Size(const char *name) : name_(name) {}
    Size(const char *name, int64_t value) : name_(name), value_(value) {}
    operator int64_t() const { return value_; }
    bool matches(int64_t value) {
        if (value_ < 0) value_ = value;
        return value_ == value;
    }
    std::string text() const;

  private:
    const char *name_;
    int64_t value_ = -1;
};

// A torch.Tensor in CPU memory, borrowed for the duration of a call. The checks throw TypeError or ValueError and name
// the argument; they return the tensor so that they can be chained.
class Tensor {
  public:
    const char *name;  // of the argument
    DType dtype;
    int item_size;  // bytes
    int dim;
    const int64_t *shape, *strides;  // strides count elements
    PyObject *object;                // the torch.Tensor

    Tensor(const char *name, DType dtype, int item_size, int dim, const int64_t *shape, const int64_t *strides,
           PyObject *object, void *data)
        : name(name), dtype(dtype), item_size(item_size), dim(dim), shape(shape), strides(strides), object(object),
          data_(data) {}

    template <class T = void>
    T *data() const {
        return static_cast<T *>(data_);
    }
    int64_t elements() const { return product(0); }
    int64_t row_elements() const { return product(1); }  // of all dimensions but the first

    const Tensor &has_dtype(std::initializer_list<DType> accepted) const {
        for (DType one : accepted)
            if (one == dtype) return *this;
        fail_dtype(accepted);
    }
    const Tensor &is_floating() const { return has_dtype({DType::FLOAT32, DType::BFLOAT16}); }
    template <class... Sizes>
    const Tensor &has_shape(Sizes &...sizes) const {
        if (dim == sizeof...(Sizes)) {
            const int64_t *at = shape;
            if ((sizes.matches(*at++) && ...)) return *this;
        }
        fail_shape({&sizes...});
    }
    const Tensor &has_shape_of(const Tensor &other) const;
    // The last `dims` dimensions are contiguous.
    const Tensor &is_dense(int dims) const {
        int64_t stride = 1;
        for (int i = dim - 1; i >= dim - dims; stride *= shape[i--])
            if (strides[i] != stride && shape[i] != 1) fail_stride(dims);
        return *this;
    }
    const Tensor &is_contiguous() const { return elements() == 0 ? *this : is_dense(dim); }

  private:
    int64_t product(int from) const {
        int64_t count = 1;
        for (int i = from; i < dim; i++) count *= shape[i];
        return count;
    }
    [[noreturn]] void fail_dtype(std::initializer_list<DType> accepted) const;
    [[noreturn]] void fail_shape(std::initializer_list<const Size *> sizes) const;
    [[noreturn]] void fail_stride(int dims) const;
    std::string shape_text() const;

    void *data_;
};

typedef std::optional<Tensor> OptionalTensor;

template <class T = void>
T *data_or_null(const OptionalTensor &tensor) {
    return tensor ? tensor->data<T>() : nullptr;
}

[[noreturn]] void fail_value(const char *argument, const char *message);

// Throws ValueError "argument: message" unless a condition holds.
inline void require(bool holds, const char *argument, const char *message) {
    if (!holds) fail_value(argument, message);
}
inline void require_same_presence(const OptionalTensor &one, const OptionalTensor &other, const char *arguments) {
    require(one.has_value() == other.has_value(), arguments, "both or neither has to be given");
}
