"""The runtime: reads a program directory and trains with it. It never imports the compiler."""
