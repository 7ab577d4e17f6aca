"""Read objects of S3, Google Cloud Storage, Azure and web servers through sparse local copies.

How bytes get from a URL into a batch:

1. Opening a URL (`mirror.open_url`) creates a folder for this version of the object: a file as large as the object, but
   without space on the disk, and a table with the state of each page of 16 KiB (`pages`). A `mirror.Mirror` stands for
   it, and `h5chunk.urls.local_copies` finds the mirror by the path of the copy. All other code opens that path.
2. HDF5 reads the headers of the file through `mirror_file`, which fetches more than it is asked for, because HDF5 reads
   small pieces one after another. These pages are kept, also without a cache: the next opening needs few requests.
3. A reader's tasks (`h5chunk.store.read.engine`) know the byte ranges that they read: their ``ranges``. A loader plans
   windows ahead, up to 256 MiB, and for each (`h5chunk.feed.fetches`) it makes the tasks and a `mirror.Hold` on their
   pages. A hold is counted in this process, and is a file lock for other processes: nobody frees these pages.
4. Absent pages are requested from the server (`client`, `server`): a separate process, so that requests do not depend
   on forks of the training process and on its GIL. It joins ranges that are close, divides them into requests of at
   most 4 MiB, of which 64 are in flight, and asks for no page twice. Other windows wait for requests meanwhile, so that
   as many are in flight at the borders of batches and epochs. Failed requests are repeated (`objects`), and each names
   the version of the object, so that a changed object is an error.
5. The server writes what it received to the copy, and marks the pages as present. With the last page of a window, it
   answers, and the window's tasks read the copy like any local file, in native threads.
6. The hold ends when the window is read. Without a ``cache_dir`` the server frees the pages, so that the disk holds
   only what is read ahead; they are mostly written and freed before the system writes them to the disk. With one they
   stay, with checksums, because a power failure may lose bytes of pages that are marked as present. Once all data is
   cached, a loader reads it like a local file. `h5chunk.feed.disk_cache` keeps the cache below ``cache_bytes``.

`download` does not use copies: it writes whole objects, and folders of them, for commands that read all of their bytes.
"""
