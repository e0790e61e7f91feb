"""The path of every call: the call's form is found or prepared, filled in, logged and launched."""
