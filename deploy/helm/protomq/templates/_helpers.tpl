{{/* Begins the names of all that the chart makes. */}}
{{- define "protomq.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "protomq.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "protomq.selector" . }}
{{- end -}}

{{- define "protomq.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "protomq.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Each name server by its own name: they share no state, and whoever registers does so with each. */}}
{{- define "protomq.namesrvAddresses" -}}
{{- $full := include "protomq.fullname" . -}}
{{- $places := list -}}
{{- range $i := until (int .Values.namesrv.replicas) -}}
{{- $places = append $places (printf "%s-namesrv-%d.%s-namesrv-pods.%s.svc.%s:9876" $full $i $full $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- join ";" $places -}}
{{- end -}}

{{- define "protomq.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# A store has many files: their owner is changed only where it is wrong.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "protomq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end -}}

{{/* What helm cannot see from the types of single values. */}}
{{- define "protomq.check" -}}
{{- $elected := eq (include "protomq.elected" .) "true" -}}
{{- if and $elected (not .Values.etcd.endpoints) -}}
{{- fail "broker.replicas is above 1, or broker.elected true, so etcd elects the masters: set etcd.endpoints, or broker.replicas=1" -}}
{{- end -}}
{{- if and (not $elected) (omit (default dict .Values.broker.config.etcd) "endpoints") -}}
{{- fail "broker.config.etcd is for brokers whose master is elected: leave it out, or set broker.elected=true" -}}
{{- end -}}
{{- if gt (int .Values.broker.minInSyncReplicas) (int .Values.broker.replicas) -}}
{{- fail "broker.minInSyncReplicas is above broker.replicas: every send would be refused" -}}
{{- end -}}
{{- if gt (int .Values.broker.minInSyncReplicas) (int .Values.broker.inSyncReplicas) -}}
{{- fail "broker.minInSyncReplicas is above broker.inSyncReplicas: no broker would start" -}}
{{- end -}}
{{- $full := include "protomq.fullname" . -}}
{{- range $name := .Values.broker.names -}}
{{- $known := lookup "apps/v1" "StatefulSet" $.Release.Namespace (printf "%s-%s" $full $name) -}}
{{- if $known -}}
{{- $wasElected := contains "PROTOMQ_BROKER_ID" (toJson $known) -}}
{{- if and $elected (eq (include "protomq.firstPod" (list $ $name)) "0") -}}
{{- fail (printf "the messages of %s are in the volume of pod %s-%s-0, and elected brokers begin with pod -1: it would begin empty. First give that volume to pod -1 (deploy/README.md, From one replica to several)" $name $full $name) -}}
{{- end -}}
{{- if and (gt (int $.Values.broker.replicas) 1) (not $wasElected) -}}
{{- fail (printf "%s is a single master: one of the empty replicas would lead. First set broker.elected=true with broker.replicas=1, and promote it (deploy/README.md, From one replica to several)" $name) -}}
{{- end -}}
{{- if and $wasElected (not $elected) (gt (int (dig "spec" "replicas" 1 $known)) 1) -}}
{{- fail (printf "%s has several replicas, and the one that would be left may lack messages. First set broker.elected=true with broker.replicas=1 (deploy/README.md, From one replica to several)" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether etcd elects the masters: "true" or "false". */}}
{{- define "protomq.elected" -}}
{{- or .Values.broker.elected (gt (int .Values.broker.replicas) 1) -}}
{{- end -}}

{{/* The number of the first pod of a broker; of the root and the name. A single one that was installed with number 0 keeps it, and its volume. */}}
{{- define "protomq.firstPod" -}}
{{- $root := index . 0 -}}
{{- $known := lookup "apps/v1" "StatefulSet" $root.Release.Namespace (printf "%s-%s" (include "protomq.fullname" $root) (index . 1)) -}}
{{- ternary 1 (dig "spec" "ordinals" "start" 0 $known) (empty $known) | int -}}
{{- end -}}

{{/* Fails where a config names a setting of the chart's own, which would be overwritten; of its path, itself, what the chart sets, and what to set. */}}
{{- define "protomq.refuseOwn" -}}
{{- $path := index . 0 -}}
{{- $given := index . 1 -}}
{{- $instead := index . 3 -}}
{{- range $key, $own := index . 2 -}}
{{- if hasKey $given $key -}}
{{- $value := get $given $key -}}
{{- if and (kindIs "map" $own) (kindIs "map" $value) -}}
{{- include "protomq.refuseOwn" (list (printf "%s.%s" $path $key) $value $own $instead) -}}
{{- else -}}
{{- $place := printf "%s.%s" $path $key -}}
{{- $advice := ternary (printf "set %s" (get $instead $place)) "leave it out" (hasKey $instead $place) -}}
{{- fail (printf "%s is not yours to set, the chart does: %s" $place $advice) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
