"""What `qattn bench` measures: one file a measurement, each a generator of JSON rows; tables and pictures of rows."""
