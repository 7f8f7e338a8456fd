"""Pipelines that are ready to run.

    python -m protomq_spark.pipelines flights --namesrv host:9876 --data build/flights --table /tmp/delays ...
    spark-submit ... -m protomq_spark.pipelines flights ...

Each is a module with `add_arguments(parser)` and `run(spark, arguments, report)`; see `docs/spark.md`.
"""
