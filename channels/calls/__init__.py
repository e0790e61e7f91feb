"""Makes every call: finds or prepares the call's form, fills in the addresses, logs the call and launches it."""
