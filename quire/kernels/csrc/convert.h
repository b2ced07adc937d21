// Python values as C++ values and back. A value of the wrong type throws TypeError and names the argument.
#pragma once

#include <Python.h>

#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tensor.h"

bool find_tensor_type();  // looks torch.Tensor up; returns false with a Python error set if that fails
bool is_supported(PyObject *object, DType &dtype);  // a tensor in CPU memory whose last dimension has no gaps

[[noreturn]] void fail_type(const char *name, const char *expected, PyObject *object);

template <class T>
struct Convert;

template <>
struct Convert<Tensor> {
    static Tensor from_python(PyObject *object, const char *name);
};

template <class T>
struct Convert<std::optional<T>> {
    static std::optional<T> from_python(PyObject *object, const char *name) {
        if (object == Py_None) return std::nullopt;
        return Convert<T>::from_python(object, name);
    }
};

template <>
struct Convert<int64_t> {
    static int64_t from_python(PyObject *object, const char *name);
};

template <>
struct Convert<double> {
    static double from_python(PyObject *object, const char *name);
};

template <>
struct Convert<float> {
    static float from_python(PyObject *object, const char *name) { return float(Convert<double>::from_python(object, name)); }
};

template <>
struct Convert<std::string_view> {
    static std::string_view from_python(PyObject *object, const char *name);
};

template <class T>
struct Convert<std::vector<T>> {
    static std::vector<T> from_python(PyObject *object, const char *name) {
        if (!PyList_Check(object) && !PyTuple_Check(object)) fail_type(name, "a list or tuple", object);
        std::vector<T> values(PySequence_Fast_GET_SIZE(object));
        for (size_t i = 0; i < values.size(); i++)
            values[i] = Convert<T>::from_python(PySequence_Fast_GET_ITEM(object, i), name);
        return values;
    }
};

// A reference to a Python object, kept and released with the interpreter's lock.
class Reference {
  public:
    explicit Reference(PyObject *object) : object_(Py_NewRef(object)) {}
    Reference(const Reference &other) : object_(Py_NewRef(other.object_)) {}
    Reference &operator=(const Reference &) = delete;
    ~Reference() { Py_DECREF(object_); }

  private:
    PyObject *object_;
};

// Values that Python only passes on are capsules with the name of their type.
template <class T>
struct Convert<std::shared_ptr<const T>> {
    static std::shared_ptr<const T> from_python(PyObject *object, const char *name) {
        void *value = PyCapsule_CheckExact(object) ? PyCapsule_GetPointer(object, T::NAME) : nullptr;
        if (!value) fail_type(name, T::NAME, object);
        return *static_cast<std::shared_ptr<const T> *>(value);
    }
};

template <class T>
PyObject *to_python(std::shared_ptr<const T> value) {
    auto drop = [](PyObject *capsule) {
        delete static_cast<std::shared_ptr<const T> *>(PyCapsule_GetPointer(capsule, T::NAME));
    };
    auto *kept = new std::shared_ptr<const T>(std::move(value));
    PyObject *capsule = PyCapsule_New(kept, T::NAME, drop);
    if (!capsule) delete kept;
    return capsule;
}

PyObject *to_python(int64_t value);
PyObject *to_python(const std::vector<int64_t> &values);
