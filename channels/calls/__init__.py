"""The path of every call: finds or prepares the call's form, fills it in, logs the call and launches it."""
