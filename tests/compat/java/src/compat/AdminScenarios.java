package compat;

import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.AlterConfigOp.OpType;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.ConsumerGroupListing;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.CreateTopicsResult;
import org.apache.kafka.clients.admin.DescribeConfigsOptions;
import org.apache.kafka.clients.admin.DescribeTopicsOptions;
import org.apache.kafka.clients.admin.ListConsumerGroupOffsetsSpec;
import org.apache.kafka.clients.admin.MemberDescription;
import org.apache.kafka.clients.admin.MemberToRemove;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.admin.TopicListing;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.GroupIdNotFoundException;
import org.apache.kafka.common.errors.GroupNotEmptyException;
import org.apache.kafka.common.errors.GroupSubscribedToTopicException;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.errors.InvalidPartitionsException;
import org.apache.kafka.common.errors.InvalidReplicationFactorException;
import org.apache.kafka.common.errors.InvalidTopicException;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.errors.UnknownMemberIdException;
import org.apache.kafka.common.errors.UnknownTopicIdException;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;

/** Scenarios of the admin client: topics, configs, offsets, the cluster, groups. */
final class AdminScenarios {
    private AdminScenarios() {}

    static void register(Map<String, Body> scenarios) {
        scenarios.put("admin.topics", AdminScenarios::topics);
        scenarios.put("admin.configs", AdminScenarios::configs);
        scenarios.put("admin.groups", AdminScenarios::groups);
        scenarios.put("admin.list-offsets", AdminScenarios::listOffsets);
        scenarios.put("admin.cluster", AdminScenarios::cluster);
        scenarios.put("admin.remove-members", AdminScenarios::removeMembers);
    }

    private static void topics(Run run) throws Exception {
        Admin admin = run.clients.admin();
        String topic = run.fresh("t");
        NewTopic wanted = new NewTopic(topic, 2, (short) 1).configs(Map.of("retention.ms", "1234567"));
        Clients.get(admin.createTopics(List.of(wanted), new CreateTopicsOptions().validateOnly(true)).all());
        Check.fails(UnknownTopicOrPartitionException.class, () -> describe(admin, topic), "a validated topic");

        CreateTopicsResult created = admin.createTopics(List.of(wanted));
        Uuid id = Clients.get(created.topicId(topic));
        Check.equal(Clients.get(created.numPartitions(topic)), 2, "partitions of the answer");
        Check.equal(Clients.get(created.replicationFactor(topic)), 1, "the replication factor of the answer");
        Config answered = Clients.get(created.config(topic));
        Check.equal(answered.get("retention.ms").value(), "1234567", "retention.ms of the answer");
        TopicDescription described = describe(admin, topic);
        Check.equal(described.topicId(), id, "the topic id");
        Check.equal(described.partitions().size(), 2, "partitions");
        Check.that(!described.isInternal(), "it is not internal");
        Check.that(described.partitions().stream().allMatch(part -> part.leader() != null && part.isr().size() == 1),
                "each partition has a leader: " + described);
        TopicListing listed = Clients.get(admin.listTopics().namesToListings()).get(topic);
        Check.equal(listed.topicId(), id, "the topic id of the list");
        TopicDescription byId = Clients.get(
                admin.describeTopics(TopicCollection.ofTopicIds(List.of(id))).allTopicIds()).get(id);
        Check.equal(byId.name(), topic, "the name of the id");

        run.clients.addPartitions(topic, 5);
        Check.eventually(() -> describe(admin, topic).partitions().size() == 5, "five partitions");
        TopicDescription paged = Clients.get(admin.describeTopics(
                        TopicCollection.ofTopicNames(List.of(topic)),
                        new DescribeTopicsOptions().partitionSizeLimitPerResponse(2))
                .allTopicNames()).get(topic);
        Check.equal(
                paged.partitions().stream().map(part -> part.partition()).toList(),
                List.of(0, 1, 2, 3, 4),
                "partitions in pages of two");
        Check.fails(
                InvalidPartitionsException.class,
                () -> Clients.get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all()),
                "fewer partitions");

        Check.fails(TopicExistsException.class, () -> create(admin, new NewTopic(topic, 1, (short) 1)), "a second one");
        Check.fails(InvalidTopicException.class, () -> create(admin, new NewTopic("a b", 1, (short) 1)), "a bad name");
        Check.fails(
                InvalidReplicationFactorException.class,
                () -> create(admin, new NewTopic(run.fresh("t"), 1, (short) 0)),
                "no replicas");
        Check.fails(
                InvalidPartitionsException.class,
                () -> create(admin, new NewTopic(run.fresh("t"), 0, (short) 1)),
                "no partitions");
        Check.fails(
                InvalidConfigurationException.class,
                () -> create(admin, new NewTopic(run.fresh("t"), 1, (short) 1).configs(Map.of("retention.ms", "x"))),
                "a bad config");
        NewTopic byDefault = new NewTopic(run.fresh("t"), Optional.empty(), Optional.empty());
        create(admin, byDefault);
        Check.that(!describe(admin, byDefault.name()).partitions().isEmpty(), "default partitions");

        Clients.get(admin.deleteTopics(TopicCollection.ofTopicIds(List.of(id))).all());
        run.clients.deleteTopic(byDefault.name());
        Check.eventually(() -> !Clients.get(admin.listTopics().names()).contains(topic), "the topic is gone");
        Check.fails(UnknownTopicOrPartitionException.class, () -> describe(admin, topic), "describing a deleted topic");
        Check.fails(
                UnknownTopicOrPartitionException.class,
                () -> Clients.get(admin.deleteTopics(List.of(topic)).all()),
                "deleting it again");
        Check.fails(
                UnknownTopicIdException.class,
                () -> Clients.get(admin.deleteTopics(TopicCollection.ofTopicIds(List.of(id))).all()),
                "deleting its id again");
        Check.fails(
                UnknownTopicIdException.class,
                () -> Clients.get(admin.describeTopics(TopicCollection.ofTopicIds(List.of(id))).allTopicIds()),
                "describing a deleted id");
    }

    private static Void create(Admin admin, NewTopic topic) {
        return Clients.get(admin.createTopics(List.of(topic)).all());
    }

    private static TopicDescription describe(Admin admin, String topic) {
        return Clients.get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic);
    }

    private static void configs(Run run) throws Exception {
        Admin admin = run.clients.admin();
        String topic = run.topic(1);
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        ConfigEntry policy = config(admin, resource, "cleanup.policy");
        Check.equal(policy.value(), "delete", "cleanup.policy");
        Check.equal(policy.type(), ConfigEntry.ConfigType.LIST, "the type of cleanup.policy");
        Check.equal(policy.source(), ConfigEntry.ConfigSource.DEFAULT_CONFIG, "the source of cleanup.policy");
        Check.that(policy.documentation() != null, "cleanup.policy has documentation");

        alter(admin, resource, OpType.SET, "retention.ms", "3600000");
        Check.eventually(() -> config(admin, resource, "retention.ms").value().equals("3600000"), "retention.ms is set");
        ConfigEntry retention = config(admin, resource, "retention.ms");
        Check.equal(retention.source(), ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG, "the source of retention.ms");
        Check.equal(retention.synonyms().get(0).value(), "3600000", "the first synonym of retention.ms");
        alter(admin, resource, OpType.APPEND, "cleanup.policy", "compact");
        Check.eventually(
                () -> Set.of(config(admin, resource, "cleanup.policy").value().split(","))
                        .equals(Set.of("delete", "compact")),
                "compact is appended");
        alter(admin, resource, OpType.SUBTRACT, "cleanup.policy", "delete");
        Check.eventually(() -> config(admin, resource, "cleanup.policy").value().equals("compact"), "and delete gone");
        alter(admin, resource, OpType.DELETE, "retention.ms", "");
        Check.eventually(() -> config(admin, resource, "retention.ms").isDefault(), "retention.ms is a default again");
        Check.fails(
                InvalidConfigurationException.class,
                () -> alter(admin, resource, OpType.SET, "retention.ms", "soon"),
                "a bad value");
        Check.fails(
                InvalidConfigurationException.class,
                () -> alter(admin, resource, OpType.SET, "no.such.config", "1"),
                "an unknown config");
        Check.fails(
                UnknownTopicOrPartitionException.class,
                () -> config(admin, new ConfigResource(ConfigResource.Type.TOPIC, run.fresh("t")), "retention.ms"),
                "an unknown topic");

        String broker = Clients.get(admin.describeCluster().nodes()).iterator().next().idString();
        ConfigResource node = new ConfigResource(ConfigResource.Type.BROKER, broker);
        ConfigEntry maximum = config(admin, node, "message.max.bytes");
        Check.that(Integer.parseInt(maximum.value()) > 0, "message.max.bytes of the broker");
        Check.equal(maximum.type(), ConfigEntry.ConfigType.INT, "its type");
    }

    private static ConfigEntry config(Admin admin, ConfigResource resource, String name) {
        DescribeConfigsOptions options = new DescribeConfigsOptions().includeSynonyms(true).includeDocumentation(true);
        ConfigEntry entry =
                Clients.get(admin.describeConfigs(List.of(resource), options).all()).get(resource).get(name);
        Check.that(entry != null, name + " is not described");
        return entry;
    }

    private static Void alter(Admin admin, ConfigResource resource, OpType operation, String name, String value) {
        Collection<AlterConfigOp> operations = List.of(new AlterConfigOp(new ConfigEntry(name, value), operation));
        return Clients.get(admin.incrementalAlterConfigs(Map.of(resource, operations)).all());
    }

    private static void listOffsets(Run run) {
        String topic = run.topic(2);
        List<TopicPartition> partitions = List.of(new TopicPartition(topic, 0), new TopicPartition(topic, 1));
        long baseMs = System.currentTimeMillis() - 100_000;
        List<ProducerRecord<byte[], byte[]>> records = new java.util.ArrayList<>();
        for (int offset : new int[] {0, 3, 1}) {
            records.add(new ProducerRecord<>(topic, 0, baseMs + offset * 1000L, null, DataScenarios.bytes("x")));
        }
        DataScenarios.send(run, Map.of(), records);
        expect(run, partitions, OffsetSpec.earliest(), 0, 0);
        expect(run, partitions, OffsetSpec.latest(), 3, 0);
        expect(run, partitions, OffsetSpec.forTimestamp(baseMs + 500), 1, -1);
        expect(run, partitions, OffsetSpec.forTimestamp(baseMs + 5000), -1, -1);
        expect(run, partitions, OffsetSpec.maxTimestamp(), 1, -1);
        expect(run, partitions, OffsetSpec.earliestLocal(), 0, 0);
        expect(run, partitions, OffsetSpec.latestTiered(), -1, -1);
    }

    private static void expect(Run run, List<TopicPartition> partitions, OffsetSpec asked, long first, long second) {
        Map<TopicPartition, Long> found = run.clients.offsets(partitions, asked);
        Check.equal(
                found,
                Map.of(partitions.get(0), first, partitions.get(1), second),
                asked.getClass().getSimpleName());
    }

    private static void cluster(Run run) {
        Admin admin = run.clients.admin();
        var described = admin.describeCluster();
        Check.that(!Clients.get(described.clusterId()).isEmpty(), "the cluster has an id");
        var nodes = Clients.get(described.nodes());
        Check.that(nodes.contains(Clients.get(described.controller())), "the controller is a node");
        String topic = run.topic(1);
        Integer id = nodes.iterator().next().id();
        var directories = Clients.get(admin.describeLogDirs(List.of(id)).allDescriptions()).get(id);
        Check.that(
                directories.values().stream()
                        .anyMatch(directory -> directory.replicaInfos().containsKey(new TopicPartition(topic, 0))),
                "the log directories hold the topic");
        Clients.get(admin.describeFeatures().featureMetadata());
    }

    private static void groups(Run run) throws Exception {
        Admin admin = run.clients.admin();
        String topic = run.topic(1);
        String group = run.fresh("g");
        TopicPartition partition = new TopicPartition(topic, 0);
        View view = run.journal(topic, 1);
        run.produce(topic, 1, 1);
        Member member = run.start(new MemberOptions("c1", group).topics(topic).assignors("range"));
        view.waitCaughtUp();
        Check.that(listed(admin).contains(group), "the group is listed");
        ConsumerGroupDescription described = describeGroup(admin, group);
        Check.equal(described.state().toString(), "Stable", "the state");
        Check.equal(described.partitionAssignor(), "range", "the assignor");
        MemberDescription only = described.members().iterator().next();
        Check.equal(only.clientId(), Clients.CLIENT_ID, "the client id");
        Check.equal(only.assignment().topicPartitions(), Set.of(partition), "the assignment");
        Check.fails(
                GroupNotEmptyException.class,
                () -> Clients.get(admin.deleteConsumerGroups(List.of(group)).all()),
                "deleting a group with a member");
        Check.fails(
                GroupSubscribedToTopicException.class,
                () -> Clients.get(admin.deleteConsumerGroupOffsets(group, Set.of(partition)).all()),
                "deleting offsets that are in use");
        Check.fails(
                UnknownMemberIdException.class,
                () -> Clients.get(admin.alterConsumerGroupOffsets(group, Map.of(partition, new OffsetAndMetadata(0)))
                        .all()),
                "altering offsets of a group with a member");
        member.finish();

        Check.eventually(() -> describeGroup(admin, group).state().toString().equals("Empty"), "it is empty");
        Check.equal(run.clients.committed(group, partition), 1L, "the committed offset");
        Clients.get(admin.alterConsumerGroupOffsets(
                        group, Map.of(partition, new OffsetAndMetadata(0, Optional.of(3), "note")))
                .all());
        OffsetAndMetadata altered =
                Clients.get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(partition);
        Check.equal(altered, new OffsetAndMetadata(0, Optional.of(3), "note"), "the altered offset");
        String other = run.fresh("g");
        run.clients.commit(other, topic, 1, 1);
        Map<String, Map<TopicPartition, OffsetAndMetadata>> both = Clients.get(admin.listConsumerGroupOffsets(Map.of(
                        group, new ListConsumerGroupOffsetsSpec().topicPartitions(List.of(partition)),
                        other, new ListConsumerGroupOffsetsSpec()))
                .all());
        Check.equal(both.get(other), Map.of(partition, new OffsetAndMetadata(1)), "the offsets of another group");
        Clients.get(admin.deleteConsumerGroupOffsets(group, Set.of(partition)).all());
        Check.equal(run.clients.committed(group, partition), null, "the deleted offset");
        Clients.get(admin.deleteConsumerGroups(List.of(group, other)).all());
        Check.eventually(() -> !listed(admin).contains(group), "it is deleted");
        Check.equal(run.clients.committed(other, partition), null, "an offset of a deleted group");
        Check.fails(
                GroupIdNotFoundException.class,
                () -> Clients.get(admin.deleteConsumerGroups(List.of(group)).all()),
                "deleting it again");
    }

    private static Set<String> listed(Admin admin) {
        Collection<ConsumerGroupListing> found = Clients.get(admin.listConsumerGroups().all());
        return found.stream().map(ConsumerGroupListing::groupId).collect(Collectors.toSet());
    }

    static ConsumerGroupDescription describeGroup(Admin admin, String group) {
        return Clients.get(admin.describeConsumerGroups(List.of(group)).all()).get(group);
    }

    /** Remove a closed static member by its group.instance.id, and then remove all members. */
    private static void removeMembers(Run run) throws Exception {
        Admin admin = run.clients.admin();
        String topic = run.topic(2);
        String group = run.fresh("g");
        View view = run.journal(topic, 2);
        Member stays = run.start(new MemberOptions("stays", group).topics(topic).instance("i-1", 20_000));
        Member goes = run.start(new MemberOptions("goes", group).topics(topic).instance("i-2", 20_000));
        view.waitSettled(List.of("stays", "goes"), Clients.allOf(topic, 2));
        goes.finish();
        Check.equal(describeGroup(admin, group).members().size(), 2, "members after a static one went away");
        remove(admin, group, "i-2");
        view.waitSettled(List.of("stays"), Clients.allOf(topic, 2), 4);
        Check.fails(UnknownMemberIdException.class, () -> remove(admin, group, "i-2"), "removing it again");
        run.produce(topic, 2, 3);
        view.waitCaughtUp();
        stays.finish();
        RemoveMembersFromConsumerGroupOptions everyone = new RemoveMembersFromConsumerGroupOptions();
        everyone.reason("the end");
        Clients.get(admin.removeMembersFromConsumerGroup(group, everyone).all());
        ConsumerGroupDescription emptied = describeGroup(admin, group);
        Check.equal(emptied.members().size(), 0, "members after all were removed");
    }

    private static Void remove(Admin admin, String group, String instance) {
        var named = new RemoveMembersFromConsumerGroupOptions(List.of(new MemberToRemove(instance)));
        return Clients.get(admin.removeMembersFromConsumerGroup(group, named).all());
    }
}
