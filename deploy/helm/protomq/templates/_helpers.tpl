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
{{- if and (gt (int .Values.broker.replicas) 1) (not .Values.etcd.endpoints) -}}
{{- fail "broker.replicas is above 1, so etcd elects the masters: set etcd.endpoints, or broker.replicas=1" -}}
{{- end -}}
{{- if gt (int .Values.broker.minInSyncReplicas) (int .Values.broker.replicas) -}}
{{- fail "broker.minInSyncReplicas is above broker.replicas: every send would be refused" -}}
{{- end -}}
{{- if gt (int .Values.broker.minInSyncReplicas) (int .Values.broker.inSyncReplicas) -}}
{{- fail "broker.minInSyncReplicas is above broker.inSyncReplicas: no broker would start" -}}
{{- end -}}
{{- if dig "etcd" "endpoints" false .Values.broker.config -}}
{{- fail "broker.config.etcd.endpoints is not the chart's to read: set etcd.endpoints" -}}
{{- end -}}
{{- end -}}
