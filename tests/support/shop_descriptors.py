"""A descriptor set that tests of protobuf columns use, made by protobuf itself: no compiler, and no file of generated code."""

from __future__ import annotations

from google.protobuf import descriptor_pb2, duration_pb2, timestamp_pb2, wrappers_pb2

F = descriptor_pb2.FieldDescriptorProto

ORDER = "shop.v1.Order"


def shop_descriptor_set(*, with_imports: bool = True) -> bytes:
    """shop/v1/shop.proto, with a field of every kind."""
    file = descriptor_pb2.FileDescriptorProto(name="shop/v1/shop.proto", package="shop.v1", syntax="proto3")
    known = (timestamp_pb2.DESCRIPTOR, duration_pb2.DESCRIPTOR, wrappers_pb2.DESCRIPTOR)
    file.dependency.extend(module.name for module in known)
    status = file.enum_type.add(name="Status")
    for number, name in enumerate(("STATUS_UNSPECIFIED", "STATUS_PAID")):
        status.value.add(name=name, number=number)

    item = file.message_type.add(name="Item")
    item.field.add(name="sku", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    item.field.add(name="count", number=2, type=F.TYPE_UINT32, label=F.LABEL_OPTIONAL)

    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="LabelsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=F.TYPE_MESSAGE, type_name=".shop.v1.Item", label=F.LABEL_OPTIONAL
    )
    scalars = (
        ("id", F.TYPE_INT64), ("total", F.TYPE_DOUBLE), ("weight", F.TYPE_FLOAT), ("paid", F.TYPE_BOOL), ("name", F.TYPE_STRING),
        ("raw", F.TYPE_BYTES), ("small", F.TYPE_SINT32), ("unsigned", F.TYPE_UINT32), ("huge", F.TYPE_FIXED64),
    )  # fmt: skip
    for number, (name, kind) in enumerate(scalars, 1):
        order.field.add(name=name, number=number, type=kind, label=F.LABEL_OPTIONAL)
    order.field.add(name="status", number=20, type=F.TYPE_ENUM, type_name=".shop.v1.Status", label=F.LABEL_OPTIONAL)
    messages = (
        ("first", ".shop.v1.Item"), ("at", ".google.protobuf.Timestamp"), ("took", ".google.protobuf.Duration"),
        ("discount", ".google.protobuf.DoubleValue"),
    )  # fmt: skip
    for number, (name, kind_name) in enumerate(messages, 21):
        order.field.add(name=name, number=number, type=F.TYPE_MESSAGE, type_name=kind_name, label=F.LABEL_OPTIONAL)
    order.field.add(name="items", number=30, type=F.TYPE_MESSAGE, type_name=".shop.v1.Item", label=F.LABEL_REPEATED)
    order.field.add(name="codes", number=31, type=F.TYPE_INT32, label=F.LABEL_REPEATED)
    order.field.add(
        name="labels", number=32, type=F.TYPE_MESSAGE, type_name=".shop.v1.Order.LabelsEntry", label=F.LABEL_REPEATED
    )
    note = order.field.add(name="note", number=33, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    note.proto3_optional = True
    note.oneof_index = 0
    order.oneof_decl.add(name="_note")

    tree = file.message_type.add(name="Tree")
    tree.field.add(name="left", number=1, type=F.TYPE_MESSAGE, type_name=".shop.v1.Tree", label=F.LABEL_OPTIONAL)
    file.message_type.add(name="Empty")

    whole = descriptor_pb2.FileDescriptorSet(file=[file])
    if with_imports:
        for module in known:
            module.CopyToProto(whole.file.add())
    return whole.SerializeToString()
