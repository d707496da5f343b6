package org.apache.kafka.common.test.junit;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ExecutionException;
import kafka.server.ControllerServer;
import kafka.server.KafkaBroker;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.admin.FeatureUpdate;
import org.apache.kafka.clients.admin.ListTopicsOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.UpdateFeaturesOptions;
import org.apache.kafka.clients.consumer.GroupProtocol;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.network.ListenerName;
import org.apache.kafka.common.test.ClusterInstance;
import org.apache.kafka.common.test.api.ClusterConfig;
import org.apache.kafka.common.test.api.Type;
import org.apache.kafka.server.fault.FaultHandlerException;
import org.junit.jupiter.api.extension.AfterEachCallback;
import org.junit.jupiter.api.extension.BeforeEachCallback;
import org.junit.jupiter.api.extension.Extension;
import org.junit.jupiter.api.extension.TestTemplateInvocationContext;
import upstream.Outside;
import upstream.Seen;

/**
 * Replaces Kafka's class of this name. The cluster that a {@code @ClusterTest} receives runs outside this process.
 *
 * <p>Few tests depend on whether controllers have processes of their own. So a test that is written for both cases runs
 * only with controllers that have them.
 */
public class RaftClusterInvocationContext implements TestTemplateInvocationContext {
    private final String baseDisplayName;
    private final ClusterConfig clusterConfig;
    private final boolean isCombined;

    public RaftClusterInvocationContext(String baseDisplayName, ClusterConfig clusterConfig, boolean isCombined) {
        this.baseDisplayName = baseDisplayName;
        this.clusterConfig = clusterConfig;
        this.isCombined = isCombined;
    }

    @Override
    public String getDisplayName(int invocationIndex) {
        boolean twin = isCombined && clusterConfig.clusterTypes().contains(Type.KRAFT);
        String tags = String.join(",", clusterConfig.displayTags());
        return baseDisplayName + " [" + invocationIndex + "] " + (twin ? "(the same cluster once more) " : "") + tags;
    }

    @Override
    public List<Extension> getAdditionalExtensions() {
        Cluster cluster = new Cluster();
        return List.of(
                (BeforeEachCallback) context -> {
                    cluster.test = context.getRequiredTestClass().getSimpleName() + "."
                            + context.getRequiredTestMethod().getName();
                    if (clusterConfig.isAutoStart()) {
                        cluster.start();
                    }
                },
                (AfterEachCallback) context -> cluster.stop(),
                new ClusterInstanceParameterResolver(cluster));
    }

    private final class Cluster implements ClusterInstance {
        private static final Duration PATIENCE = Duration.ofSeconds(15);
        private static final long PAUSE_MS = 20;

        private String test = "";
        private Outside outside;
        private boolean stopped;
        private final Set<Integer> down = new TreeSet<>();

        @Override
        public Type type() {
            return isCombined ? Type.CO_KRAFT : Type.KRAFT;
        }

        @Override
        public ClusterConfig config() {
            return clusterConfig;
        }

        @Override
        public void start() {
            if (outside == null) {
                List<String> racks = new ArrayList<>();
                for (int number = 0; number < clusterConfig.numBrokers(); number++) {
                    var own = clusterConfig.perServerOverrideProperties().getOrDefault(number, Map.of());
                    racks.add(own.getOrDefault("broker.rack", ""));
                }
                outside = Outside.open(
                        clusterConfig.numBrokers(),
                        clusterConfig.numControllers(),
                        isCombined,
                        new HashMap<>(clusterConfig.serverProperties()),
                        racks,
                        test);
                if (!clusterConfig.features().isEmpty()) {
                    lower();
                }
            }
        }

        /** Lower the features for which the test wants a lower level. The others have their highest level already. */
        private void lower() {
            asked(admin -> {
                var levels = admin.describeFeatures().featureMetadata().get().finalizedFeatures();
                Map<String, FeatureUpdate> updates = new HashMap<>();
                clusterConfig.features().forEach((feature, level) -> {
                    var now = levels.get(feature.featureName());
                    if (now != null && level < now.maxVersionLevel()) {
                        updates.put(
                                feature.featureName(),
                                new FeatureUpdate(level, FeatureUpdate.UpgradeType.SAFE_DOWNGRADE));
                    }
                });
                if (!updates.isEmpty()) {
                    admin.updateFeatures(updates, new UpdateFeaturesOptions()).all().get();
                }
                return null;
            });
        }

        @Override
        public boolean started() {
            return outside != null;
        }

        @Override
        public void stop() {
            if (outside != null && !stopped) {
                stopped = true;
                outside.close();
            }
        }

        @Override
        public boolean stopped() {
            return stopped;
        }

        @Override
        public String bootstrapServers() {
            return outside.bootstrap();
        }

        @Override
        public String bootstrapControllers() {
            return outside.controllers();
        }

        @Override
        public List<Integer> controllerBoundPorts() {
            return outside.controllerPorts();
        }

        @Override
        public List<Integer> brokerBoundPorts() {
            return outside.ports();
        }

        @Override
        public ListenerName clientListener() {
            return ListenerName.normalised("EXTERNAL");
        }

        @Override
        public ListenerName controllerListenerName() {
            return ListenerName.normalised("CONTROLLER");
        }

        /** Return no brokers, or mocks of them for tests that ask only for their ids and ports ({@link Seen}). */
        @Override
        public Map<Integer, KafkaBroker> brokers() {
            Map<Integer, KafkaBroker> seen = new TreeMap<>();
            if (Seen.by(test)) {
                Seen.brokers(outside, List.of()).forEach(broker -> seen.put(broker.config().brokerId(), broker));
            }
            return seen;
        }

        /** Return no controllers, or ids mapped to null for tests that ask only for the ids ({@link Seen}). */
        @Override
        public Map<Integer, ControllerServer> controllers() {
            Map<Integer, ControllerServer> seen = new TreeMap<>();
            if (Seen.by(test)) {
                controllerIds().forEach(id -> seen.put(id, null));
            }
            return seen;
        }

        @Override
        public Set<Integer> controllerIds() {
            try (Admin admin = Admin.create(
                    Map.of(AdminClientConfig.BOOTSTRAP_CONTROLLERS_CONFIG, outside.controllers()))) {
                Set<Integer> ids = new TreeSet<>();
                for (Node node : admin.describeCluster().nodes().get()) {
                    ids.add(node.id());
                }
                return ids;
            } catch (InterruptedException | ExecutionException error) {
                throw new IllegalStateException(error);
            }
        }

        @Override
        public Set<Integer> brokerIds() {
            return asked(admin -> {
                Set<Integer> ids = new TreeSet<>();
                for (Node node : admin.describeCluster().nodes().get()) {
                    ids.add(node.id());
                }
                return ids;
            });
        }

        @Override
        public String clusterId() {
            return asked(admin -> admin.describeCluster().clusterId().get());
        }

        @Override
        public Set<GroupProtocol> supportedGroupProtocols() {
            String protocols = clusterConfig.serverProperties().get("group.coordinator.rebalance.protocols");
            return protocols != null && !protocols.contains("consumer")
                    ? Set.of(GroupProtocol.CLASSIC)
                    : Set.of(GroupProtocol.CLASSIC, GroupProtocol.CONSUMER);
        }

        @Override
        public Optional<FaultHandlerException> firstFatalException() {
            return Optional.empty();
        }

        @Override
        public Optional<FaultHandlerException> firstNonFatalException() {
            return Optional.empty();
        }

        @Override
        public void shutdownBroker(int id) {
            outside.tell("stop", id - outside.first());
            down.add(id);
        }

        @Override
        public void startBroker(int id) {
            outside.tell("start", id - outside.first());
            down.remove(id);
        }

        @Override
        public Map<Integer, KafkaBroker> aliveBrokers() {
            Map<Integer, KafkaBroker> alive = brokers();
            alive.keySet().removeAll(down);
            return alive;
        }

        @Override
        public void waitForReadyBrokers() {}

        @Override
        public void ensureConsistentMetadata() {}

        @Override
        public void ensureConsistentMetadata(Collection<KafkaBroker> brokers, Collection<ControllerServer> controllers) {}

        @Override
        public void createTopic(String topic, int partitions, short replicas, Map<String, String> configs) {
            asked(admin -> admin.createTopics(List.of(new NewTopic(topic, partitions, replicas).configs(configs)))
                    .all()
                    .get());
            waitTopicCreation(topic, partitions);
        }

        @Override
        public void createTopic(String topic, int partitions, short replicas) {
            createTopic(topic, partitions, replicas, Map.of());
        }

        @Override
        public void waitTopicCreation(String topic, int partitions) {
            await("topic " + topic, admin -> topics(admin).contains(topic));
        }

        @Override
        public void waitTopicDeletion(String topic) {
            await("no topic " + topic, admin -> !topics(admin).contains(topic));
        }

        private static Set<String> topics(Admin admin) throws InterruptedException, ExecutionException {
            return admin.listTopics(new ListTopicsOptions().listInternal(true)).names().get();
        }

        private interface Question<T> {
            T to(Admin admin) throws InterruptedException, ExecutionException;
        }

        private <T> T asked(Question<T> question) {
            try (Admin admin = admin()) {
                return question.to(admin);
            } catch (InterruptedException | ExecutionException error) {
                throw new IllegalStateException(error);
            }
        }

        private void await(String what, Question<Boolean> question) {
            long deadline = System.nanoTime() + PATIENCE.toNanos();
            asked(admin -> {
                while (!question.to(admin)) {
                    if (System.nanoTime() > deadline) {
                        throw new AssertionError("not within " + PATIENCE + ": " + what);
                    }
                    Thread.sleep(PAUSE_MS);
                }
                return null;
            });
        }
    }
}
