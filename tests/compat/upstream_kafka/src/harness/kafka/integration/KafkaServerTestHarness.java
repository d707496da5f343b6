package kafka.integration;

import java.io.File;
import java.lang.reflect.Field;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import kafka.server.BrokerServer;
import kafka.server.ControllerServer;
import kafka.server.KafkaBroker;
import kafka.server.KafkaConfig;
import kafka.server.QuorumTestHarness;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.admin.FeatureUpdate;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.admin.UpdateFeaturesOptions;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.network.ListenerName;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.common.utils.Time;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.TestInfo;
import scala.Option;
import scala.collection.Seq;
import scala.collection.mutable.ArrayBuffer;
import scala.collection.mutable.Buffer;
import scala.jdk.javaapi.CollectionConverters;
import upstream.Meters;
import upstream.Outside;
import upstream.Secured;
import upstream.Seen;
import upstream.Tests;

/**
 * Replaces Kafka's class of this name. Brokers outside this process answer what the tests ask of a cluster.
 *
 * <p>Names and signatures are those that the compiled tests call. There are no brokers in this process. So a test that
 * looks at all brokers gets none, or mocks with ids and ports ({@link Seen}). Methods that need the inside of a broker
 * are refused.
 */
public abstract class KafkaServerTestHarness extends QuorumTestHarness {
    private static final Duration PATIENCE = Duration.ofSeconds(15);
    private static final long PAUSE_MS = 20;
    private static final String OLDER_TRANSACTIONS = "isTV2Enabled=false";
    private static final String TRANSACTION_VERSION = "transaction.version";
    private static final short OLDER = 1;
    private static final String RACK = "broker.rack";

    private Seq<KafkaConfig> instanceConfigs;
    private boolean[] alive = new boolean[0];
    private Outside outside;
    private List<KafkaBroker> seen = List.of();

    public abstract Seq<KafkaConfig> generateConfigs();

    @BeforeEach
    @Override
    public void setUp(TestInfo testInfo) {
        remember(testInfo);
        List<KafkaConfig> configs = CollectionConverters.asJava(configs());
        Map<String, String> settings = new HashMap<>();
        configs.get(0).originals().forEach((name, value) -> settings.put(name, String.valueOf(value)));
        alive = new boolean[configs.size()];
        java.util.Arrays.fill(alive, true);
        String test = getClass().getSimpleName() + "." + testInfo.getTestMethod().orElseThrow().getName();
        List<String> racks = new ArrayList<>();
        configs.forEach(config -> racks.add(String.valueOf(config.originals().getOrDefault(RACK, ""))));
        configureSecurityBeforeServersStart(testInfo);
        outside = securityProtocol() == SecurityProtocol.PLAINTEXT
                ? Outside.open(configs.size(), settings, racks, test)
                : Outside.openSecured(
                        configs.size(),
                        Secured.settings(configs.get(0).originals(), securityProtocol()),
                        test,
                        securityProtocol().name(),
                        Secured.scramUsers(this::addFormatterSettings));
        if (securityProtocol() != SecurityProtocol.PLAINTEXT) {
            Meters.bind();
        }
        seen = Seen.by(test)
                ? Seen.brokers(outside, configs.stream().map(KafkaConfig::originals).toList())
                : List.of();
        if (testInfo.getDisplayName().contains(OLDER_TRANSACTIONS)) {
            lowerTransactionVersion();
        }
        configureSecurityAfterServersStart();
    }

    /** Lower transaction.version to 1. With Kafka's harness, the test would format its own cluster with version 1. */
    private void lowerTransactionVersion() {
        var lowered = new FeatureUpdate(OLDER, FeatureUpdate.UpgradeType.SAFE_DOWNGRADE);
        long deadline = Time.SYSTEM.milliseconds() + PATIENCE.toMillis();
        try (Admin admin = admin()) {
            admin.updateFeatures(Map.of(TRANSACTION_VERSION, lowered), new UpdateFeaturesOptions())
                    .all()
                    .get();
            while (finalizedLevel(admin) != OLDER) {
                if (Time.SYSTEM.milliseconds() > deadline) {
                    throw new IllegalStateException("brokers do not lower " + TRANSACTION_VERSION);
                }
                Thread.sleep(PAUSE_MS);
            }
        } catch (ExecutionException | InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private static short finalizedLevel(Admin admin) throws ExecutionException, InterruptedException {
        var finalized = admin.describeFeatures().featureMetadata().get().finalizedFeatures();
        var range = finalized.get(TRANSACTION_VERSION);
        return range == null ? 0 : range.maxVersionLevel();
    }

    /** Set the superclass's private `testInfo`. It reads a test's group protocol from JUnit's display name in there. */
    private void remember(TestInfo testInfo) {
        try {
            Field field = QuorumTestHarness.class.getDeclaredField("testInfo");
            field.setAccessible(true);
            field.set(this, testInfo);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    @AfterEach
    @Override
    public void tearDown() {
        if (outside != null) {
            outside.close();
        }
    }

    public Seq<KafkaConfig> instanceConfigs() {
        return instanceConfigs;
    }

    public void instanceConfigs_$eq(Seq<KafkaConfig> configs) {
        instanceConfigs = configs;
    }

    public Seq<KafkaConfig> configs() {
        if (instanceConfigs == null) {
            instanceConfigs = generateConfigs();
        }
        return instanceConfigs;
    }

    /** Return no brokers, or mocks of them for tests that ask only for their ids and ports ({@link Seen}). */
    public Buffer<KafkaBroker> brokers() {
        List<KafkaBroker> all = new ArrayList<>(seen);
        return CollectionConverters.asScala(all);
    }

    public Buffer<KafkaBroker> servers() {
        return brokers();
    }

    public Buffer<BrokerServer> brokerServers() {
        return new ArrayBuffer<>();
    }

    public Seq<KafkaBroker> aliveBrokers() {
        List<KafkaBroker> there = new ArrayList<>();
        for (int index = 0; index < seen.size(); index++) {
            if (alive[index]) {
                there.add(seen.get(index));
            }
        }
        return CollectionConverters.asScala(there);
    }

    public boolean[] alive() {
        return alive;
    }

    public void alive_$eq(boolean[] now) {
        alive = now;
    }

    @Override
    public Seq<ControllerServer> controllerServers() {
        return new ArrayBuffer<>();
    }

    @Override
    public ControllerServer controllerServer() {
        return null;
    }

    public void configureSecurityBeforeServersStart(TestInfo testInfo) {}

    public void configureSecurityAfterServersStart() {}

    public Option<KafkaBroker> serverForId(int id) {
        int index = id - outside.first();
        return Option.apply(index >= 0 && index < seen.size() ? seen.get(index) : null);
    }

    public int boundPort(KafkaBroker server) {
        return outside.ports().get(Math.max(seen.indexOf(server), 0));
    }

    public String bootstrapServers(ListenerName listenerName) {
        return outside.secured();
    }

    public ListenerName bootstrapServers$default$1() {
        return listenerName();
    }

    public SecurityProtocol securityProtocol() {
        return SecurityProtocol.PLAINTEXT;
    }

    public ListenerName listenerName() {
        return ListenerName.forSecurityProtocol(securityProtocol());
    }

    public Option<File> trustStoreFile() {
        return Option.empty();
    }

    public Option<Properties> serverSaslProperties() {
        return Option.empty();
    }

    public Option<Properties> clientSaslProperties() {
        return Option.empty();
    }

    public Time brokerTime(int brokerId) {
        return Time.SYSTEM;
    }

    public void recreateBrokers(boolean reconfigure, boolean startup) {
        throw inside("recreateBrokers");
    }

    public boolean recreateBrokers$default$1() {
        return false;
    }

    public boolean recreateBrokers$default$2() {
        return false;
    }

    /** Create the offsets topic by looking up a coordinator. */
    public void createOffsetsTopic(ListenerName listenerName, Properties adminClientConfig)
            throws ExecutionException, InterruptedException {
        Tests.lookForCoordinator();
    }

    public ListenerName createOffsetsTopic$default$1() {
        return listenerName();
    }

    public Properties createOffsetsTopic$default$2() {
        return new Properties();
    }

    public scala.collection.immutable.Map<Object, Object> createTopic(
            String topic,
            int numPartitions,
            int replicationFactor,
            Properties topicConfig,
            ListenerName listenerName,
            Properties adminClientConfig) {
        Map<String, String> configs = new HashMap<>();
        topicConfig.forEach((name, value) -> configs.put(String.valueOf(name), String.valueOf(value)));
        // Some tests request as many replicas as there are brokers in this process, which is none.
        short replicas = (short) Math.max(replicationFactor, 1);
        return create(new NewTopic(topic, numPartitions, replicas).configs(configs));
    }

    public int createTopic$default$2() {
        return 1;
    }

    public int createTopic$default$3() {
        return 1;
    }

    public Properties createTopic$default$4() {
        return new Properties();
    }

    public ListenerName createTopic$default$5() {
        return listenerName();
    }

    public Properties createTopic$default$6() {
        return new Properties();
    }

    public scala.collection.immutable.Map<Object, Object> createTopicWithAssignment(
            String topic, scala.collection.Map<Object, Seq<Object>> assignment, ListenerName listenerName) {
        Map<Integer, List<Integer>> replicas = new HashMap<>();
        CollectionConverters.asJava(assignment).forEach((partition, brokers) -> {
            List<Integer> ids = new ArrayList<>();
            CollectionConverters.asJava(brokers).forEach(id -> ids.add((Integer) id));
            replicas.put((Integer) partition, ids);
        });
        return create(new NewTopic(topic, replicas));
    }

    public ListenerName createTopicWithAssignment$default$3() {
        return listenerName();
    }

    private scala.collection.immutable.Map<Object, Object> create(NewTopic topic) {
        try (Admin admin = admin()) {
            admin.createTopics(List.of(topic)).all().get();
            TopicDescription described =
                    await("topic " + topic.name(), () -> describe(admin, topic.name()));
            Map<Object, Object> leaders = new HashMap<>();
            described.partitions().forEach(partition -> leaders.put(partition.partition(), partition.leader().id()));
            return scala.collection.immutable.Map.from(CollectionConverters.asScala(leaders));
        } catch (ExecutionException error) {
            return KafkaServerTestHarness.<RuntimeException, scala.collection.immutable.Map<Object, Object>>raise(
                    error.getCause());
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private static TopicDescription describe(Admin admin, String topic) throws InterruptedException, ExecutionException {
        try {
            TopicDescription described =
                    admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic);
            boolean led = described.partitions().stream().allMatch(partition -> partition.leader() != null);
            return led ? described : null;
        } catch (ExecutionException error) {
            if (error.getCause() instanceof UnknownTopicOrPartitionException) {
                return null;
            }
            throw error;
        }
    }

    public void deleteTopic(String topic, ListenerName listenerName) {
        try (Admin admin = admin()) {
            admin.deleteTopics(List.of(topic)).all().get();
            await("no topic " + topic, () -> describe(admin, topic) == null ? topic : null);
        } catch (ExecutionException error) {
            KafkaServerTestHarness.<RuntimeException, Void>raise(error.getCause());
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    public ListenerName deleteTopic$default$2() {
        return listenerName();
    }

    private interface Look<T> {
        T now() throws InterruptedException, ExecutionException;
    }

    private static <T> T await(String what, Look<T> look) throws InterruptedException, ExecutionException {
        long deadline = System.nanoTime() + PATIENCE.toNanos();
        while (true) {
            T seen = look.now();
            if (seen != null) {
                return seen;
            }
            if (System.nanoTime() > deadline) {
                throw new AssertionError("not within " + PATIENCE + ": " + what);
            }
            Thread.sleep(PAUSE_MS);
        }
    }

    /** Throw any exception without declaring it, as Scala's methods do. */
    @SuppressWarnings("unchecked")
    private static <E extends Throwable, T> T raise(Throwable error) throws E {
        throw (E) error;
    }

    public void addAndVerifyAcls(
            scala.collection.immutable.Set<org.apache.kafka.common.acl.AccessControlEntry> acls,
            org.apache.kafka.common.resource.ResourcePattern resource) {
        throw inside("addAndVerifyAcls");
    }

    public void removeAndVerifyAcls(
            scala.collection.immutable.Set<org.apache.kafka.common.acl.AccessControlEntry> acls,
            org.apache.kafka.common.resource.ResourcePattern resource) {
        throw inside("removeAndVerifyAcls");
    }

    public int killRandomBroker() {
        killBroker(0);
        return 0;
    }

    public void killBroker(int index) {
        outside.tell("stop", index);
        alive[index] = false;
    }

    public void killBroker(int index, Duration timeout) {
        killBroker(index);
    }

    public void startBroker(int index) {
        outside.tell("start", index);
        alive[index] = true;
    }

    public void restartDeadBrokers(boolean reconfigure) {
        for (int index = 0; index < alive.length; index++) {
            if (!alive[index]) {
                startBroker(index);
            }
        }
    }

    public boolean restartDeadBrokers$default$1() {
        return false;
    }

    /** Do nothing, because the brokers read SCRAM credentials whenever a client authenticates. */
    public void waitForUserScramCredentialToAppearOnAllBrokers(String clientPrincipal, String mechanismName) {
    }

    public scala.collection.immutable.Map<String, Uuid> getTopicIds(Seq<String> names) {
        try (Admin admin = admin()) {
            Map<String, Uuid> ids = new HashMap<>();
            admin.describeTopics(CollectionConverters.asJava(names)).allTopicNames().get()
                    .forEach((name, topic) -> ids.put(name, topic.topicId()));
            return scala.collection.immutable.Map.from(CollectionConverters.asScala(ids));
        } catch (InterruptedException | ExecutionException error) {
            throw new IllegalStateException(error);
        }
    }

    public scala.collection.immutable.Map<String, Uuid> getTopicIds() {
        try (Admin admin = admin()) {
            List<String> names = new ArrayList<>(admin.listTopics().names().get());
            return getTopicIds(CollectionConverters.asScala(names));
        } catch (InterruptedException | ExecutionException error) {
            throw new IllegalStateException(error);
        }
    }

    public scala.collection.immutable.Map<Uuid, String> getTopicNames() {
        Map<Uuid, String> names = new HashMap<>();
        CollectionConverters.asJava(getTopicIds()).forEach((name, id) -> names.put(id, name));
        return scala.collection.immutable.Map.from(CollectionConverters.asScala(names));
    }

    /** Do nothing, because a change by an admin client is done on every broker that the client can ask. */
    public void ensureConsistentKRaftMetadata() {}

    public void changeClientIdConfig(String sanitizedClientId, Properties configs) {
        throw inside("changeClientIdConfig");
    }

    private Admin admin() {
        return Admin.create(Map.of(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, outside.bootstrap()));
    }

    private static UnsupportedOperationException inside(String what) {
        return new UnsupportedOperationException(what + " needs a broker in this process");
    }
}
