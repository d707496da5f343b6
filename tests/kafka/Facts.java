import java.util.Map;
import java.util.TreeMap;
import kafka.server.KafkaConfig;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.errors.RetriableException;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.server.common.Feature;
import org.apache.kafka.server.common.FeatureVersion;
import org.apache.kafka.server.common.KRaftVersion;
import org.apache.kafka.server.common.MetadataVersion;
import org.apache.kafka.server.config.DynamicBrokerConfig;

/** Prints facts that only Kafka's classes know, one per line, their parts separated by tabs (`facts.py`). */
public final class Facts {
    private Facts() {}

    public static void main(String[] arguments) {
        for (Errors error : Errors.values()) {
            print("error", error.name(), error.code(), error.exception() instanceof RetriableException);
        }
        feature(MetadataVersion.FEATURE_NAME, MetadataVersion.MINIMUM_VERSION.featureLevel(),
            MetadataVersion.latestProduction().featureLevel(), MetadataVersion.latestTesting().featureLevel());
        for (Feature feature : Feature.PRODUCTION_FEATURES) {
            int highest = 0;
            for (FeatureVersion version : feature.featureVersions()) {
                highest = Math.max(highest, version.featureLevel());
            }
            feature(feature.featureName(), feature.minimumProduction(), feature.latestProduction(), highest);
        }
        Map<String, String> modes = DynamicBrokerConfig.dynamicConfigUpdateModes();
        for (ConfigDef.ConfigKey key : new TreeMap<>(KafkaConfig.configDef().configKeys()).values()) {
            print("setting", key.name, key.type, default_of(key), key.internalConfig ? "internal" : "",
                modes.getOrDefault(key.name, "read-only"));
        }
    }

    private static void feature(String name, int lowest, int highest, int highestUnstable) {
        print("feature", name, lowest, highest, highestUnstable);
    }

    private static String default_of(ConfigDef.ConfigKey key) {
        if (!key.hasDefault()) {
            return "<none>";
        }
        return key.defaultValue == null ? "<null>" : ConfigDef.convertToString(key.defaultValue, key.type);
    }

    private static void print(Object... parts) {
        StringBuilder line = new StringBuilder();
        for (Object part : parts) {
            line.append(line.length() == 0 ? "" : "\t").append(part);
        }
        System.out.println(line);
    }
}
