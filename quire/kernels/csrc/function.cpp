#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "function.h"

#include <new>

bool arrange_arguments(const char *function, const char *const *parameters, size_t count, PyObject *const *values,
                       Py_ssize_t positional, PyObject *keywords, PyObject **out) {
    size_t given = size_t(positional) + (keywords ? PyTuple_GET_SIZE(keywords) : 0);
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "%s(): %zu arguments are expected, not %zu", function, count, given);
        return false;
    }
    for (size_t i = 0; i < count; i++) out[i] = Py_ssize_t(i) < positional ? values[i] : nullptr;
    for (size_t i = positional; i < given; i++) {
        PyObject *keyword = PyTuple_GET_ITEM(keywords, i - positional);
        size_t at = i;  // in the usual case keywords come in the order of the parameters
        if (PyUnicode_CompareWithASCIIString(keyword, parameters[at]) != 0)
            for (at = positional; at < count && PyUnicode_CompareWithASCIIString(keyword, parameters[at]) != 0;) at++;
        if (at == count) {
            PyErr_Format(PyExc_TypeError, "%s(): unknown argument '%U'", function, keyword);
            return false;
        }
        out[at] = values[i];
    }
    return true;  // all parameters are set: their count matches, all are known, and Python rejects repeated keywords
}

void fail_type(const char *name, const char *expected, PyObject *object) {
    PyErr_Clear();
    throw TypeError(std::string(name) + ": " + expected + " is expected, not " + Py_TYPE(object)->tp_name);
}

int64_t Convert<int64_t>::from_python(PyObject *object, const char *name) {
    int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) fail_type(name, "an int of 64 bits", object);
    return value;
}

double Convert<double>::from_python(PyObject *object, const char *name) {
    double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) fail_type(name, "a float", object);
    return value;
}

std::string_view Convert<std::string_view>::from_python(PyObject *object, const char *name) {
    Py_ssize_t size;
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (!text) fail_type(name, "a str", object);
    return {text, size_t(size)};
}

PyObject *to_python(int64_t value) { return PyLong_FromLongLong(value); }

PyObject *to_python(const std::vector<int64_t> &values) {
    PyObject *list = PyList_New(values.size());
    for (size_t i = 0; list && i < values.size(); i++) {
        PyObject *item = to_python(values[i]);
        if (!item) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, item);
    }
    return list;
}

void set_python_error(const char *function) {
    try {
        throw;
    } catch (const TypeError &error) {
        PyErr_Format(PyExc_TypeError, "%s(): %s", function, error.what());
    } catch (const ValueError &error) {
        PyErr_Format(PyExc_ValueError, "%s(): %s", function, error.what());
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    }
}
