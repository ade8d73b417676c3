"""The built-in architectures: each module here is one, under its own name.

`kcdsl.model.registry` finds them and says what such a module declares and defines.
"""
