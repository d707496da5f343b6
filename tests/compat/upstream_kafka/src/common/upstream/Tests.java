package upstream;

import static net.bytebuddy.matcher.ElementMatchers.named;
import static net.bytebuddy.matcher.ElementMatchers.returns;

import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.net.Socket;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import kafka.integration.KafkaServerTestHarness;
import kafka.network.SocketServer;
import net.bytebuddy.ByteBuddy;
import net.bytebuddy.agent.ByteBuddyAgent;
import net.bytebuddy.dynamic.loading.ClassReloadingStrategy;
import net.bytebuddy.implementation.FixedValue;
import net.bytebuddy.implementation.MethodDelegation;
import net.bytebuddy.implementation.StubMethod;
import net.bytebuddy.implementation.bind.annotation.AllArguments;
import net.bytebuddy.implementation.bind.annotation.Argument;
import net.bytebuddy.implementation.bind.annotation.This;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.admin.CreateAclsResult;
import org.apache.kafka.clients.admin.TopicListing;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.metadata.BrokerState;
import org.apache.kafka.metadata.LeaderAndIsr;
import scala.jdk.javaapi.CollectionConverters;

/**
 * Replacements for helpers of Kafka's tests that use brokers in the test's process, where there are none. Their waits
 * return at once. Requests go to the first broker outside, unless the test sees brokers ({@link Seen}) and names one.
 */
public final class Tests {
    private static final int FIRST = 1;

    private Tests() {}

    static void bind() throws ClassNotFoundException {
        ByteBuddyAgent.install();
        Class<?> helpers = Class.forName("kafka.utils.TestUtils$");
        new ByteBuddy()
                .redefine(helpers)
                .method(named("createOffsetsTopicWithAdmin"))
                .intercept(MethodDelegation.to(Offsets.class))
                .method(named("createTransactionStateTopicWithAdmin"))
                .intercept(MethodDelegation.to(Nothing.class))
                .method(named("waitForAllPartitionsMetadata"))
                .intercept(MethodDelegation.to(Led.class))
                .method(named("waitUntilLeaderIsKnown"))
                .intercept(FixedValue.value(FIRST))
                .method(named("waitForPartitionMetadata"))
                .intercept(MethodDelegation.to(Leader.class))
                .method(named("createAdminClient"))
                .intercept(MethodDelegation.to(Admins.class))
                .method(named("bootstrapServers").or(named("plaintextBootstrapServers")))
                .intercept(MethodDelegation.to(Bootstrap.class))
                .method(named("waitUntilBrokerMetadataIsPropagated")
                        .or(named("verifyTopicDeletion"))
                        .or(named("ensureConsistentKRaftMetadata")))
                .intercept(StubMethod.INSTANCE)
                .make()
                .load(helpers.getClassLoader(), ClassReloadingStrategy.fromInstalledAgent());
        Class<?> requests = Class.forName("kafka.server.BaseRequestTest");
        new ByteBuddy()
                .redefine(requests)
                .method(returns(SocketServer.class))
                .intercept(MethodDelegation.to(Server.class))
                .method(named("connect").and(returns(Socket.class)))
                .intercept(MethodDelegation.to(Door.class))
                .make()
                .load(requests.getClassLoader(), ClassReloadingStrategy.fromInstalledAgent());
        try {
            Class<?> groups = Class.forName("kafka.server.GroupCoordinatorBaseRequestTest");
            // Without brokers the original returns true, because `allMatch` of an empty stream is true.
            new ByteBuddy()
                    .redefine(groups)
                    .method(named("isUnstableApiEnabled"))
                    .intercept(FixedValue.value(false))
                    // In older versions it returns a Scala map, and their tests that run do not call it.
                    .method(named("getTopicIds").and(returns(Map.class)))
                    .intercept(MethodDelegation.to(Topics.class))
                    .make()
                    .load(groups.getClassLoader(), ClassReloadingStrategy.fromInstalledAgent());
        } catch (ClassNotFoundException older) {
            // The tests' Kafka version has no such class.
        }
    }

    /** Look up a group's coordinator, because the first look-up creates the offsets topic. */
    public static void lookForCoordinator() throws ExecutionException, InterruptedException {
        try (Admin admin = Topics.admin()) {
            admin.listConsumerGroupOffsets("nobody").partitionsToOffsetAndMetadata().get();
        }
    }

    /** Creates the offsets topic, and returns an empty map. The original helper returns the partitions' leaders. */
    public static final class Offsets {
        private Offsets() {}

        public static scala.collection.immutable.Map<Object, Object> created()
                throws ExecutionException, InterruptedException {
            lookForCoordinator();
            return Nothing.nothing();
        }
    }

    /** Returns an empty map. The original helpers return the partitions' leaders. */
    public static final class Nothing {
        private Nothing() {}

        public static scala.collection.immutable.Map<Object, Object> nothing() {
            return scala.collection.immutable.Map$.MODULE$.empty();
        }
    }

    /**
     * Creates admin clients whose `createAcls` returns when the ACLs exist. Tests do not check its result, but wait for
     * the authorizers of brokers in this process.
     */
    public static final class Admins {
        private Admins() {}

        private static void waitFor(CreateAclsResult made) throws InterruptedException {
            try {
                made.all().get();
            } catch (ExecutionException refused) {
                // A test that expects a refusal looks at the result itself.
            }
        }

        public static Admin made(@Argument(2) Properties given) {
            Properties config = new Properties();
            config.putAll(given);
            if (!config.containsKey(AdminClientConfig.BOOTSTRAP_CONTROLLERS_CONFIG)) {
                config.putIfAbsent(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, Outside.latest());
            }
            Admin admin = Admin.create(config);
            return (Admin) Proxy.newProxyInstance(
                    Admins.class.getClassLoader(), new Class<?>[] {Admin.class}, (self, method, arguments) -> {
                        try {
                            Object result = method.invoke(admin, arguments);
                            if (result instanceof CreateAclsResult made) {
                                waitFor(made);
                            }
                            return result;
                        } catch (InvocationTargetException error) {
                            throw error.getCause();
                        }
                    });
        }
    }

    /** Returns the first broker as the leader of a partition. */
    public static final class Leader {
        private Leader() {}

        public static LeaderAndIsr first() {
            return new LeaderAndIsr(FIRST, List.of(FIRST));
        }
    }

    /** Returns the addresses of the brokers outside, whichever brokers of this process the test passes. */
    public static final class Bootstrap {
        private Bootstrap() {}

        public static String outside() {
            return Outside.latest();
        }
    }

    /**
     * Returns which broker outside leads each partition of a topic. Returns nothing for a topic that the test expects
     * to be gone, and nothing for `__transaction_state`, because a gateway coordinates transactions without this topic.
     */
    public static final class Led {
        private Led() {}

        public static scala.collection.immutable.Map<Object, Object> led(
                @Argument(1) String topic, @Argument(2) int partitions)
                throws ExecutionException, InterruptedException {
            if (partitions == 0 || topic.equals("__transaction_state")) {
                return Nothing.nothing();
            }
            Map<Object, Object> found = new HashMap<>();
            try (Admin admin = Topics.admin()) {
                var described = admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic);
                described.partitions().forEach(partition -> {
                    int leader = partition.leader().id();
                    found.put(
                            new TopicPartition(topic, partition.partition()), new LeaderAndIsr(leader, List.of(leader)));
                });
            }
            return scala.collection.immutable.Map.from(CollectionConverters.asScala(found));
        }
    }

    /** Returns the ids of all topics, which the original helper reads from a controller in this process. */
    public static final class Topics {
        private Topics() {}

        static Admin admin() {
            return Admin.create(Map.of(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, Outside.latest()));
        }

        public static Map<String, Uuid> ids() throws ExecutionException, InterruptedException {
            Map<String, Uuid> ids = new HashMap<>();
            try (Admin admin = admin()) {
                for (TopicListing topic : admin.listTopics().listings().get()) {
                    ids.put(topic.name(), topic.topicId());
                }
            }
            return ids;
        }
    }

    /** Returns the socket server of the requested or first running broker, or null if the test sees no brokers. */
    public static final class Server {
        private Server() {}

        public static SocketServer of(@This Object test, @AllArguments Object[] asked) {
            var brokers = ((KafkaServerTestHarness) test).brokers();
            if (brokers.isEmpty()) {
                return null;
            }
            if (asked.length > 0) {
                return ((KafkaServerTestHarness) test).serverForId((Integer) asked[0]).get().socketServer();
            }
            return CollectionConverters.asJava(brokers).stream()
                    .filter(broker -> broker.brokerState() == BrokerState.RUNNING)
                    .findFirst()
                    .orElseThrow()
                    .socketServer();
        }
    }

    /** Opens a connection to the requested broker, or to the first one if the test requests none. */
    public static final class Door {
        private Door() {}

        public static Socket connected(@This Object test, @Argument(0) SocketServer asked) throws IOException {
            KafkaServerTestHarness harness = (KafkaServerTestHarness) test;
            String first = harness.bootstrapServers(harness.listenerName()).split(",")[0];
            int colon = first.lastIndexOf(':');
            int port = asked == null
                    ? Integer.parseInt(first.substring(colon + 1))
                    : asked.boundPort(harness.listenerName());
            return new Socket(first.substring(0, colon), port);
        }
    }
}
