"""Filters that the broker evaluates for its consumers: which records of a run does an expression or a module of theirs let through?

    text  ->  sql_syntax -> sql_nodes -> sql_rules (closure), constants (what every match contains)   SQL92
              cel_filter                                                                            CEL
    bytes ->  wasm_filter                                                                           WebAssembly

    run of records  ->  search (records that hold the constants)  ->  fields (only what is named)  ->  closure

Nothing here knows sockets, the store or a clock. docs/filters.md says what users write.
"""
