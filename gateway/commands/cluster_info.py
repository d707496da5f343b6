"""`sluice cluster info`: the cluster's id, controller and nodes, by Kafka's protocol, with any broker."""

from __future__ import annotations

import argparse

from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from protocol.messages.describe_cluster import DescribeClusterRequest, DescribeClusterResponse


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    info = commands.add_parser("info", parents=[common], help="id, controller and nodes of the cluster")
    info.set_defaults(command=show_info)


def show_info(cluster: Cluster, given: argparse.Namespace) -> int:
    response = cluster.ask(DescribeClusterResponse, DescribeClusterRequest())
    if response.error_code:
        why = reason(response.error_code, response.error_message, needs="--operation describe --cluster")
        raise CommandError(f"the cluster: {why}")
    nodes: list[Row] = [
        {
            "node": node.broker_id,
            "host": node.host,
            "port": node.port,
            "rack": node.rack,
            "controller": node.broker_id == response.controller_id,
        }
        for node in sorted(response.brokers, key=lambda node: node.broker_id)
    ]
    head: Row = {"id": response.cluster_id, "controller": response.controller_id}
    if given.json:
        show([{**head, "nodes": nodes}], (), as_json=True)
        return 0
    show([head], ("id", "controller"), as_json=False)
    print()
    show(nodes, ("node", "host", "port", "rack", "controller"), as_json=False)
    return 0
