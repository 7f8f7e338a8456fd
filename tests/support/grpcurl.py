#!/usr/bin/env python
"""A stand-in for grpcurl, for machines without it: `list`, `describe NAME` and calls with JSON. It knows only what the server's
reflection says.

    grpcurl.py -plaintext [-d JSON] HOST:PORT list | describe NAME | SERVICE/METHOD
"""

from __future__ import annotations

import argparse

import grpc
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", dest="data", default="{}")
    parser.add_argument("address")
    parser.add_argument("verb")
    parser.add_argument("name", nargs="?")
    asked = parser.parse_args()
    with grpc.insecure_channel(asked.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        if asked.verb == "list":
            print(*database.get_services(), sep="\n")
        elif asked.verb == "describe":
            described = descriptor_pb2.ServiceDescriptorProto()
            pool.FindServiceByName(asked.name).CopyToProto(described)
            print(asked.name, "is a service:", described, sep="\n")
        else:
            service, _, name = asked.verb.partition("/")
            method = pool.FindServiceByName(service).FindMethodByName(name)
            request = json_format.Parse(asked.data, message_factory.GetMessageClass(method.input_type)(), descriptor_pool=pool)
            call: grpc.UnaryUnaryMultiCallable[Message, Message] = channel.unary_unary(
                f"/{asked.verb}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            print(json_format.MessageToJson(call(request, timeout=30), descriptor_pool=pool))


if __name__ == "__main__":
    main()
