"""The one path of every call: its form is found or prepared, filled in, logged and launched."""
