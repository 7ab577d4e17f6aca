"""What can be packed. A source gives its fields, its length, and samples by number.

``listing`` says which samples there are (in a folder, an archive or a manifest), ``container`` gets their bytes,
``decode`` turns bytes into pixels, ``images`` puts the three together.
"""
