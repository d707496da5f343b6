package upstream;

import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.function.Function;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.metadata.LeaderAndIsr;
import org.mockito.Mockito;
import org.mockito.stubbing.Answer;

/**
 * A mock of a broker's metadata cache, for tests that read the cache of a broker in their own process. Each call asks
 * the brokers outside with an admin client. Admin clients do not receive leader epochs, so the mock has none.
 */
final class SeenMetadata {
    private final Outside outside;

    private SeenMetadata(Outside outside) {
        this.outside = outside;
    }

    /** Return a mock. `type` is the class of the metadata cache in the tests' Kafka version. */
    static Object cache(Outside outside, Class<?> type) {
        SeenMetadata seen = new SeenMetadata(outside);
        return Mockito.mock(type, (Answer<?>) asked -> {
            Object[] given = asked.getArguments();
            return switch (asked.getMethod().getName()) {
                case "contains" -> given[0] instanceof String topic && seen.topic(topic).isPresent();
                case "getTopicId" -> seen.topic((String) given[0]).map(TopicDescription::topicId).orElse(Uuid.ZERO_UUID);
                case "numPartitions" -> seen.topic((String) given[0]).map(topic -> topic.partitions().size());
                case "getLeaderAndIsr" -> seen.partition(given).map(SeenMetadata::leaderAndIsr);
                case "getPartitionLeaderEndpoint" -> seen.partition(given).map(SeenMetadata::leader);
                case "topicConfig" -> seen.ownSettings((String) given[0]);
                case "toString" -> "what the brokers outside know";
                default -> throw new UnsupportedOperationException(
                        asked.getMethod().getName() + " needs a broker in this process");
            };
        });
    }

    private Optional<TopicDescription> topic(String name) throws Exception {
        try {
            return Optional.of(ask(admin -> admin.describeTopics(List.of(name)).allTopicNames()).get(name));
        } catch (ExecutionException error) {
            if (error.getCause() instanceof UnknownTopicOrPartitionException) {
                return Optional.empty();
            }
            throw error;
        }
    }

    /** Return a partition, if it exists. `given` begins with the topic's name and the partition's number. */
    private Optional<TopicPartitionInfo> partition(Object[] given) throws Exception {
        int number = (Integer) given[1];
        return topic((String) given[0]).flatMap(
                topic -> topic.partitions().stream().filter(each -> each.partition() == number).findFirst());
    }

    private static LeaderAndIsr leaderAndIsr(TopicPartitionInfo partition) {
        int leader = partition.leader() == null ? LeaderAndIsr.NO_LEADER : partition.leader().id();
        return new LeaderAndIsr(leader, partition.isr().stream().map(Node::id).toList());
    }

    private static Node leader(TopicPartitionInfo partition) {
        return partition.leader() == null ? Node.noNode() : partition.leader();
    }

    /** Return the configs that are set on the topic itself. */
    private Properties ownSettings(String name) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, name);
        Properties own = new Properties();
        ask(admin -> admin.describeConfigs(List.of(resource)).all()).get(resource).entries().stream()
                .filter(entry -> entry.source() == ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG)
                .forEach(entry -> own.setProperty(entry.name(), entry.value()));
        return own;
    }

    private <T> T ask(Function<Admin, KafkaFuture<T>> question) throws Exception {
        try (Admin admin = Admin.create(Map.of(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, outside.bootstrap()))) {
            return question.apply(admin).get();
        }
    }
}
