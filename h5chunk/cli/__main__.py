from h5chunk.cli import main

main()
